"""Replace a folder in one step, and read one version of a folder that others replace.

On Linux, one system call exchanges two folders. Elsewhere this takes two renames. If a process is
killed between them, the old folder has another name, and `recover_dir` renames it back.

Any number of threads and processes may do this with one folder. They exclude each other by flock,
a lock on an open folder. It moves with the folder when that is renamed, and the system releases it
when the process dies, so that a folder beside the target is abandoned if nobody holds its lock.
File systems without this lock (some network file systems) have no such exclusion.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ligermodels.converters.files import sync_file, sync_folder
from ligermodels.errors import CheckpointError, LigerError

try:
    import fcntl
except ImportError:  # This is not POSIX, and there are no locks.
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
# The file system has no such locks, or the folder may not be read.
_NO_LOCKS = (*_NO_EXCHANGE, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EPERM)
_PAUSE = 0.002  # seconds between two attempts to take a lock
_PATIENCE = 600.0  # seconds; the lock is held while files of the old folder are linked or copied
_RENAMES = 5.0  # seconds in which a process surely makes its second rename
_SETTLED = 0.001  # seconds in which a call ends that has found a folder by its name
_ATTEMPTS = 100  # to read or replace a folder while nobody else replaces it

_NEW_FOLDER = re.compile(r"\..+\.saving-[0-9a-f]{16}", re.DOTALL)


@contextlib.contextmanager
def replace_dir(target: Path, owned: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a new folder beside `target` to write into. It replaces `target` after the block.

    The files of the old folder are added to the new one as hard links. Two kinds are left out:
    files that the block wrote, and entries at the top level for whose name `owned` returns True.
    If the block or `owned` raises, the old folder does not change.

    Args: target is a resolved path. It may be absent; its parents are created.
    Raises:
        OSError: `target` cannot be replaced, or the file system reports an error.
    """
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_dir(target)
    _remove_leftovers(target)
    fresh, lock = _new_folder(target)
    try:
        yield fresh
        _replace(target, fresh, owned)
    finally:
        # After an error this is the incomplete new folder.
        _remove(fresh)
        lock.close()


def recover_dir(target: Path) -> bool:
    """Return whether the folder exists, after undoing a replacement that was killed half way.

    If a process was killed between the two renames, this renames the old folder back. If a process
    is between them, this waits for it for some seconds.
    """
    try:
        target = Path(os.path.realpath(target))
    except ValueError:  # The path has a null byte, or characters that no path can have.
        return False
    last = time.monotonic() + _RENAMES
    absent = 0
    while not os.path.isdir(target):
        late = time.monotonic() > last
        busy = False
        for aside in [] if os.path.lexists(target) else _beside(target, "replaced"):
            try:
                with _Folder(aside) as folder:
                    if folder.locked or late:
                        folder.rename(aside, target)
                    else:
                        busy = True
            except BlockingIOError:
                busy = not late
            except OSError:  # It has no longer this name, or this user may not rename it.
                pass
        if busy:
            time.sleep(_PAUSE)
        # It may be that one replacement has ended since the first look, and another has begun.
        absent = 0 if busy else absent + 1
        if absent == 3:
            return os.path.isdir(target)
    return True


def read_one_version(folder: Path, read: Callable[[Path], T]) -> T:
    """Call `read`, which opens files of a folder, until nobody has replaced it or them meanwhile.

    Args: read takes the path without links, so that no link leads it to another folder half way.
    Raises:
        LigerError, OSError: what `read` raises, if nobody has replaced the folder.
        CheckpointError: the folder was replaced during each of many calls.
    """
    for _ in range(_ATTEMPTS):
        recover_dir(folder)
        real = Path(os.path.realpath(folder))
        with _hold(real):
            before = _version(real)
            try:
                result = read(real)
            except (LigerError, OSError):
                if _version(real) == before:
                    raise
            else:
                if _version(real) == before:
                    return result
    raise CheckpointError(
        f"{folder}: the folder was replaced each of the {_ATTEMPTS} times that it was read; try "
        "again when no other process saves to it"
    )


@contextlib.contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Keep a folder open, so that no new folder gets its inode number."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.close(descriptor)


def _version(folder: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


class _Folder:
    """An open folder, which no other object of this class has open, in any process.

    Attributes: locked is False if the file system has no locks, so that others may have it open.
    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder; links are not followed.
        BlockingIOError: it is open elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.locked = False
        self._status = os.stat(path, follow_symlinks=False)
        self._descriptor: int | None = None
        if not stat.S_ISDIR(self._status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
        if fcntl is None:
            return
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
            self._status = os.fstat(self._descriptor)
        except OSError as fault:
            self.close()
            if fault.errno not in _NO_LOCKS:
                raise

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_at(self, path: Path) -> bool:
        """Return whether the folder has not been renamed or removed."""
        try:
            return os.path.samestat(self._status, os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def rename(self, path: Path, target: Path) -> None:
        """Rename the folder from `path` to `target`, if it is there and the target is absent."""
        with _wait_for(target.parent):
            if self.is_at(path) and not os.path.lexists(target):
                os.rename(path, target)

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # A fork of this process may have it open, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextlib.contextmanager
def _wait_for(path: Path) -> Iterator[bool]:
    """Lock the folder that has this path now; yield False if there is none.

    Raises:
        TimeoutError: another process holds the lock all the time.
        OSError: the path is no folder.
    """
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            folder = _Folder(path)
        except FileNotFoundError:
            yield False
            return
        except BlockingIOError:
            if time.monotonic() > last:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another save to {path} has not ended within {_PATIENCE:g} seconds",
                ) from None
            time.sleep(_PAUSE)
            continue
        with folder:
            if folder.is_at(path):
                yield True
                return


def check_replaceable(target: Path) -> None:
    """Raise OSError if `replace_dir` would refuse this path, which is resolved."""
    try:
        while True:
            found = os.stat(target)
            if not stat.S_ISDIR(found.st_mode):
                raise FileExistsError(errno.EEXIST, "the path is a file, not a folder")
            if _is_writable(target):
                break
            # If it is another folder now, a process replaced it, and it had no name for a moment.
            if os.path.samestat(found, os.stat(target)):
                raise PermissionError(errno.EACCES, "there is no permission to write to the folder")
    except FileNotFoundError:
        return
    _refuse_mounts(target)
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return
    if target == here or target in here.parents:
        raise OSError(
            errno.EBUSY,
            "the folder contains the current directory, which would be deleted; run from elsewhere",
        )


def _refuse_mounts(folder: Path) -> None:
    """Raise if a volume is mounted at a folder or in it: it would lose its place or its files."""
    mounts = _mounts_in(folder)
    if folder in mounts:
        raise OSError(errno.EBUSY, "the folder is a mount point; pass a folder inside it")
    if mounts:
        raise OSError(
            errno.EBUSY,
            f"a volume is mounted in the folder, at {mounts[0]}; unmount it, or pass another "
            "folder",
        )


def _mounts_in(folder: Path) -> list[Path]:
    """Return the mount points at and below a folder, whose path is resolved."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return [Path(path) for path, _, _ in os.walk(folder) if os.path.ismount(path)]
    # See man proc_pid_mountinfo: the fifth field is the path, with octal numbers for white space.
    fields = [line.split(b" ")[4] for line in table.splitlines()]
    names = [re.sub(rb"\\([0-7]{3})", lambda x: bytes([int(x[1], 8)]), field) for field in fields]
    raw = os.fsencode(folder)
    return [Path(os.fsdecode(x)) for x in names if x == raw or x.startswith(raw + b"/")]


def _beside(target: Path, kind: str) -> list[Path]:
    """Return the folders of a kind, "saving" or "replaced", that belong to `target`."""
    pattern = re.compile(re.escape(f".{target.name}.{kind}-") + "[0-9a-f]{16}")
    try:
        names = filter(pattern.fullmatch, os.listdir(target.parent))
    except OSError:
        return []
    return [path for name in names if (path := target.with_name(name)).is_dir()]


def _is_abandoned(path: Path) -> bool:
    """Return whether a folder that a save made is locked by nobody."""
    try:
        with _Folder(path) as folder:
            return folder.locked
    except (BlockingIOError, NotADirectoryError):
        return False


def _new_folder(target: Path) -> tuple[Path, _Folder]:
    while True:
        fresh = target.with_name(f".{target.name}.saving-{secrets.token_hex(8)}")
        fresh.mkdir()
        try:
            lock = _Folder(fresh)
            if lock.is_at(fresh):
                return fresh, lock
            lock.close()
        except (BlockingIOError, FileNotFoundError):
            pass  # Another save has taken it for abandoned before it was locked.
        except BaseException:
            fresh.rmdir()
            raise
        with contextlib.suppress(OSError):
            fresh.rmdir()


def _remove_leftovers(target: Path) -> None:
    """Remove the folders that killed processes left behind beside the target."""
    for kind in ("saving", "replaced"):
        for path in _beside(target, kind):
            with contextlib.suppress(OSError), _Folder(path) as folder:
                # While there is no target, the replaced folder is the only one.
                needed = kind == "replaced" and not target.exists()
                if folder.locked and folder.is_at(path) and not needed:
                    _remove(path)


def _remove(folder: Path) -> None:
    """Remove a folder; but if a volume has been mounted in it, leave everything."""
    if not os.path.lexists(folder) or _mounts_in(folder):
        return
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # so that a read-only folder can be emptied
    shutil.rmtree(folder, ignore_errors=True)


def _replace(target: Path, fresh: Path, owned: Callable[[str], bool]) -> None:
    """Move `fresh` to `target`, add the other files of the old folder, and remove that."""
    written = set(os.listdir(fresh))

    def carried(name: str) -> bool:
        return not owned(name) and name not in written

    for _ in range(_ATTEMPTS):
        if _replace_once(target, fresh, carried):
            return sync_folder(target.parent)
    raise OSError(errno.EBUSY, f"other processes make and remove {target} all the time")


def _replace_once(target: Path, fresh: Path, carried: Callable[[str], bool]) -> bool:
    """Return False if another process has made the target just now, so that this must repeat."""
    recover_dir(target)
    with _wait_for(target) as exists:
        if not exists:
            sync_folder(fresh)
            with _wait_for(target.parent):
                if os.path.lexists(target) or _beside(target, "replaced"):
                    return False
                os.rename(fresh, target)
            return True
        _refuse_mounts(target)
        carry = _Carry(carried)
        carry.over(target, fresh)
        shutil.copymode(target, fresh)
        sync_folder(fresh)
        old = _swap(fresh, target)
        try:
            # Others may have changed the old folder until now.
            _refuse_mounts(old)
            carry.over(old, target)
            # Calls of theirs that found it before the swap may still wait for its kernel lock.
            for _ in range(_ATTEMPTS):
                time.sleep(_SETTLED)
                if not carry.over(old, target):
                    break
        except BaseException:
            _swap_back(old, target, fresh)
            raise
        carry.finish(old, target)
        _remove(old)
    return True


class _Carry:
    """Add the files of an old folder to a new one.

    Args: wanted says of a name at the top level whether to add it.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._seen: dict[str, tuple[int, ...]] = {}  # What was at a path when it was added.
        self._taken: set[str] = set()  # What `finish` has removed from the old folder.

    def over(self, old: Path, new: Path) -> bool:
        """Add the files. In a later call, do what others did to the old folder since the last.

        Returns: whether the new folder was changed.

        Raises:
            OSError: a file or folder cannot be added, or another save is at work in a folder.
        """
        before = self._seen
        self._seen = {key: before[key] for key in self._taken}
        changed: list[Path] = []
        self._add(old, new, "", before, changed)
        gone = before.keys() - self._seen.keys()
        for key in sorted(gone, reverse=True):  # Folders come last.
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(new / key).st_mode):
                    (new / key).rmdir()
                elif _is_withdrawn(new / key, before[key], new):
                    (new / key).unlink()
        for folder in changed:
            sync_folder(folder)
        return bool(changed or gone)

    def finish(self, old: Path, new: Path) -> None:
        """Remove the old folder, unless it cannot be emptied.

        A call of others that found this folder before the swap may change it until it is gone, at
        which moment it must be empty. Until then, what they do is seen; after that, their call
        fails.
        """
        with contextlib.suppress(OSError):
            for _ in range(_ATTEMPTS):
                if self._empty(old, "") or not self.over(old, new):
                    return

    def _empty(self, old: Path, where: str) -> bool:
        """Remove what is in the new folder, too, or is not wanted; return whether that was all."""
        for name in os.listdir(old):
            path, key = old / name, f"{where}{name}"
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                is_folder = stat.S_ISDIR(found.st_mode)
                if is_folder and not self._is_kept(path, where):
                    _remove(path)
                elif is_folder:
                    same = self._seen.get(key) == (found.st_dev, found.st_ino)
                    if same and self._empty(path, f"{key}/"):
                        self._taken.add(key)
                elif not self._is_kept(path, where):
                    path.unlink()
                elif self._seen.get(key) == _look(path):
                    path.unlink()
                    self._taken.add(key)
        try:
            old.rmdir()
        except OSError:
            return False
        return True

    def _is_kept(self, path: Path, where: str) -> bool:
        if not where and not self._wanted(path.name):
            return False
        return not (_NEW_FOLDER.fullmatch(path.name) and _is_abandoned(path))

    def _add(
        self,
        old: Path,
        new: Path,
        where: str,
        before: Mapping[str, tuple[int, ...]],
        changed: list[Path],
    ) -> None:
        added = False
        for name in sorted(os.listdir(old)):
            path, copy, key = old / name, new / name, f"{where}{name}"
            with contextlib.suppress(FileNotFoundError):  # Its owner may just have removed it.
                if not self._is_kept(path, where):
                    continue
                status = os.lstat(path)
                now: tuple[int, ...] = (status.st_dev, status.st_ino)
                if stat.S_ISDIR(status.st_mode):
                    self._seen[key] = now
                    added |= self._enter(path, copy, now, before.get(key))
                    self._add(path, copy, f"{key}/", before, changed)
                    shutil.copystat(path, copy)
                    continue
                now += (status.st_size, status.st_mtime_ns)
                if _is_due(copy, before.get(key), now):
                    with contextlib.suppress(FileNotFoundError):
                        copy.unlink()
                    _link(path, copy)
                    added = True
                self._seen[key] = now
        if added:
            changed.append(new)

    def _enter(
        self, path: Path, copy: Path, now: tuple[int, ...], then: tuple[int, ...] | None
    ) -> bool:
        """Make the new folder `copy` for the old folder `path`, if the first call did not."""
        with contextlib.suppress(BlockingIOError), _Folder(path):
            if then not in (None, now):
                raise OSError(errno.EBUSY, f"{path} was replaced meanwhile; try again")
            _refuse_others(path)
            if then is None:
                copy.mkdir()
            return then is None
        raise OSError(errno.EBUSY, f"another save is at work in {path}; try again later")


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _refuse_others(path: Path) -> None:
    """Raise if a copy of what is at the path would take it from another user."""
    if not _is_writable(path) and os.stat(path).st_uid != os.geteuid():
        raise PermissionError(
            errno.EACCES, f"{path} belongs to another user, who would lose access to it"
        )


def _look(path: Path) -> tuple[int, ...] | None:
    """Return the device, the inode number, the size and the time of a file, or None."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_due(copy: Path, then: tuple[int, ...] | None, now: tuple[int, ...]) -> bool:
    """Return whether a file of the old folder must be added to the new one, or added again.

    Args: then is what the old folder held when the file was added, and now is what it holds.
    """
    found = _look(copy)
    if found is None:
        # A file that was added, and is gone from the new folder, has been moved or removed there.
        return then is None or then[:2] != now[:2]
    if then is None or then == now or found[:2] == now[:2]:
        return False  # Others wrote it into the new folder, or it is the same file already.
    # The file was replaced in the old folder, or it had to be copied and was changed there. If
    # others have changed what was added as well, the last of the two stays.
    return found[2:] == then[2:] or (found[:2] == then[:2] and found[3] <= now[3])


def _is_withdrawn(copy: Path, then: tuple[int, ...], new: Path) -> bool:
    """Return whether to remove a file that was added and is gone from the old folder.

    If it was changed since it was added, others may have done this in the new folder. It is then
    removed only if it was renamed, so that the new folder has it under another name.
    """
    found = _look(copy)
    if found is None or found[2:] == then[2:]:
        return found is not None
    others = (Path(where, name) for where, _, names in os.walk(new) for name in names)
    return found[:2] == then[:2] and any(
        (_look(other) or ())[:2] == then[:2] for other in others if other != copy
    )


def _link(source: Path, copy: Path) -> None:
    """Make a hard link to a file, or copy the file if the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except FileExistsError:
        return  # Another process has just written it into the new folder.
    except OSError:
        mode = os.lstat(source).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise  # A copy would read from the pipe or the device.
        if stat.S_ISREG(mode):
            _refuse_others(source)
        shutil.copy2(source, copy, follow_symlinks=False)
        if stat.S_ISREG(mode):
            sync_file(copy)


def _swap(fresh: Path, target: Path) -> Path:
    """Move `fresh` to `target`; return the place of the old folder."""
    if _exchange(fresh, target):
        return fresh
    aside = target.with_name(fresh.name.replace(".saving-", ".replaced-"))
    with _wait_for(target.parent):
        try:
            os.rename(target, aside)
            os.rename(fresh, target)
        except BaseException:
            if os.path.lexists(aside) and not os.path.lexists(target):
                os.rename(aside, target)
            raise
        sync_folder(target.parent)
    return aside


def _swap_back(old: Path, target: Path, fresh: Path) -> None:
    if old == fresh:
        _exchange(fresh, target)
        return
    with _wait_for(target.parent):
        os.rename(target, fresh)
        os.rename(old, target)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two paths atomically. Return False if the system cannot do this."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
