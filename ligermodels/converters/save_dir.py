"""Replace a folder in one step, and read one version of a folder that others replace.

A save writes a new folder beside the target, and flushes it. Then it takes the target's lock, links
the files that are not its own into the new folder, exchanges the two folders, moves subfolders that
are not its own to the new one, and removes the old one. On Linux, one system call exchanges two
folders. Elsewhere this takes two renames; if a process is killed between them, `recover_dir` undoes
the first.

The lock is flock on the open folder. It moves with the folder when that is renamed, and the system
releases it when the process dies. Some network file systems have no such lock.
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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ligermodels.converters.files import sync_file, sync_folder
from ligermodels.errors import CheckpointError, LigerError

try:
    import fcntl
except ImportError:  # This is not POSIX, and there are no locks.
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
_Identity = tuple[int, ...]

_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
# The file system has no such locks, or the folder may not be read.
_NO_LOCKS = (*_NOT_SUPPORTED, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EPERM)
_PATIENCE = 60.0  # seconds to wait for another save
_RENAMES = 5.0  # seconds in which a process surely makes its second rename
_PAUSE = 0.002  # seconds between two attempts to take a lock
_ATTEMPTS = 100  # to read a folder while nobody replaces it
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_BESIDE = re.compile(r"\.(.+)\.(saving|replaced)-[0-9a-f]{16}", re.DOTALL)


class FolderLock:
    """An open folder that no other object of this class has open, in any process.

    Attributes: held is False if the file system has no locks, so that others may have it open.
    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder; links are not followed.
        BlockingIOError: it is open elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.held, self._descriptor = False, None
        self._status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISDIR(self._status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
        if fcntl is None:
            return
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held, self._status = True, os.fstat(self._descriptor)
        except OSError as fault:
            self.close()
            if fault.errno not in _NO_LOCKS:
                raise

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_at(self, path: Path) -> bool:
        """Return whether the folder has not been renamed or removed."""
        try:
            return os.path.samestat(self._status, os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # A fork of this process may have it open, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextlib.contextmanager
def wait_for(path: Path) -> Iterator[bool]:
    """Lock the folder that has this path now; yield False if there is none.

    Raises:
        TimeoutError: another process has held the lock for a minute.
        OSError: the path is no folder.
    """
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            lock = FolderLock(path)
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
        with lock:
            if lock.is_at(path):
                yield True
                return


@contextlib.contextmanager
def replace_dir(target: Path, owned: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a new folder beside `target` to write into. It replaces `target` after the block.

    Entries of the old folder stay, but for two kinds: those that the block wrote, and those for
    whose name `owned` returns True. If the block or `owned` raises, the old folder does not change.

    Args: target is a resolved path. It may be absent; its parents are created.
    Raises:
        OSError: `target` cannot be replaced, or the file system reports an error.
    """
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_dir(target)
    _remove_leftovers(target, owned)
    fresh, lock = _new_folder(target)
    try:
        yield fresh
        _replace(target, fresh, owned)
    finally:
        if lock.is_at(fresh):  # After an error this is still the new folder.
            _remove_folder(fresh)
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
    while not os.path.isdir(target):
        aside = [] if os.path.lexists(target) else _beside(target, "replaced")
        late = time.monotonic() > last
        for path in aside:
            # The lock is held elsewhere, or the folder has another name now, or may not be renamed.
            with contextlib.suppress(OSError), FolderLock(path) as lock, wait_for(target.parent):
                if (lock.held or late) and lock.is_at(path) and not os.path.lexists(target):
                    os.rename(path, target)
        if not aside or late:
            return os.path.isdir(target)
        time.sleep(_PAUSE)
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


def _version(folder: Path) -> _Identity | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def check_replaceable(target: Path) -> None:
    """Raise OSError if `replace_dir` would refuse this path, which is resolved."""
    try:
        if not stat.S_ISDIR(os.stat(target).st_mode):
            raise FileExistsError(errno.EEXIST, "the path is a file, not a folder")
        if not _is_writable(target) and os.path.exists(target):
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
    with contextlib.suppress(OSError):
        found = [(name, _BESIDE.fullmatch(name)) for name in os.listdir(target.parent)]
        own = [name for name, match in found if match and match.groups() == (target.name, kind)]
        return [path for name in own if (path := target.with_name(name)).is_dir()]
    return []


def _new_folder(target: Path) -> tuple[Path, FolderLock]:
    """Make a locked folder `.NAME.saving-INODE`. After an exchange, the name tells the old one."""
    while True:
        fresh = target.with_name(f".{target.name}.saving-{secrets.token_hex(8)}")
        fresh.mkdir()
        try:
            lock = FolderLock(fresh)
            if lock.is_at(fresh):
                named = fresh.with_name(f".{target.name}.saving-{fresh.stat().st_ino:016x}")
                os.rename(fresh, named)
                return named, lock
            lock.close()
        except (BlockingIOError, FileNotFoundError):
            pass  # Another save has taken it for abandoned before it was locked.
        except BaseException:
            fresh.rmdir()
            raise
        with contextlib.suppress(OSError):
            fresh.rmdir()


def _remove_leftovers(target: Path, owned: Callable[[str], bool]) -> None:
    """Remove the folders that killed saves left beside the target, and that no process holds.

    What an old folder still holds besides its checkpoint goes to the target first.
    """
    for path in [*_beside(target, "saving"), *_beside(target, "replaced")]:
        with contextlib.suppress(OSError), FolderLock(path) as lock:
            if not lock.held or not lock.is_at(path):
                continue
            if not path.name.endswith(f"-{path.stat().st_ino:016x}"):
                if not target.exists():
                    path.rmdir()  # This fails unless it is empty: it may be the only one.
                    continue
                for name in os.listdir(path):
                    if not owned(name) and not os.path.lexists(target / name):
                        os.rename(path / name, target / name)
            _remove_folder(path)


def _replace(target: Path, fresh: Path, owned: Callable[[str], bool]) -> None:
    """Move `fresh` to `target`, add what the old folder holds besides, and remove the old one."""
    written = set(os.listdir(fresh))
    sync_folder(fresh)
    for _ in range(_ATTEMPTS):
        recover_dir(target)
        with wait_for(target) as exists:
            if exists:
                _exchange(target, fresh, lambda name: not owned(name) and name not in written)
                return sync_folder(target.parent)
            with wait_for(target.parent):
                if not os.path.lexists(target) and not _beside(target, "replaced"):
                    os.rename(fresh, target)
                    return sync_folder(target.parent)
    raise OSError(errno.EBUSY, f"other processes make and remove {target} all the time")


def _exchange(target: Path, fresh: Path, kept: Callable[[str], bool]) -> None:
    """Exchange the folder `target`, which is locked, with `fresh`, and remove the old folder.

    Args: kept says of a name in the old folder whether it stays.
    """
    _refuse_mounts(target)
    folders = [name for name in _folders(target) if kept(name)]
    for name in folders:
        _check_movable(target / name)
    linked: dict[str, _Identity] = {}
    _link_files(target, fresh, kept, linked)
    shutil.copymode(target, fresh)
    sync_folder(fresh)
    old = _swap(fresh, target)
    try:
        for name in folders:
            os.rename(old / name, target / name)
    except BaseException as fault:
        try:
            for name in folders:
                if os.path.lexists(target / name):
                    os.rename(target / name, old / name)
            _swap_back(old, target, fresh)
        except OSError:  # The file system refuses all; then the new checkpoint stays.
            warnings.warn(f"subfolders of {target} are in {old} until the next save", stacklevel=2)
        else:
            raise
        if not isinstance(fault, OSError):
            raise
    with contextlib.suppress(OSError):  # The save is done; the next one removes what is left.
        _link_files(old, target, kept, linked)  # Others may have written to the old folder.
        sync_folder(target)
        for path in old.iterdir():
            if path.is_dir() and not path.is_symlink():
                if not kept(path.name):
                    _remove_folder(path)
            elif path.name in linked or not kept(path.name):
                path.unlink()
        old.rmdir()  # It stays if something else has come just now.


def _swap(fresh: Path, target: Path) -> Path:
    """Move `fresh` to `target`; return the place of the old folder."""
    if _exchange_names(fresh, target):
        return fresh
    aside = target.with_name(fresh.name.replace(".saving-", ".replaced-"))
    with wait_for(target.parent):
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
        _exchange_names(fresh, target)
        return
    with wait_for(target.parent):
        os.rename(target, fresh)
        os.rename(old, target)


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _check_movable(folder: Path) -> None:
    """Raise if a subfolder cannot be moved to the new folder, or another save is at work in it."""
    if not _is_writable(folder):
        raise PermissionError(
            errno.EACCES, f"{folder} cannot be moved: there is no permission to write to it"
        )
    for path, _, _ in os.walk(folder):
        if _BESIDE.fullmatch(os.path.basename(path)):
            try:
                FolderLock(Path(path)).close()
            except BlockingIOError:
                where = os.path.dirname(path)
                raise OSError(
                    errno.EBUSY, f"another save is at work in {where}; try again later"
                ) from None


def _link_files(
    old: Path, new: Path, kept: Callable[[str], bool], linked: dict[str, _Identity]
) -> None:
    """Add the files of the old folder that stay to the new one, but for those in `linked`."""
    for name in filter(kept, sorted(os.listdir(old))):
        with contextlib.suppress(FileNotFoundError):  # Its owner may just have removed it.
            status = os.lstat(old / name)
            now = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            if stat.S_ISDIR(status.st_mode):
                continue
            if name not in linked:
                _link(old / name, new / name, status)
            elif linked[name] != now:  # It was replaced, or it had to be copied and was changed.
                os.replace(old / name, new / name)
            linked[name] = now


def _link(source: Path, copy: Path, status: os.stat_result) -> None:
    """Make a hard link to a file, or copy the file if the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except FileExistsError:
        return  # Another process has just written it into the new folder.
    except OSError:
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            raise  # A copy would read from the pipe or the device.
        if stat.S_ISREG(status.st_mode) and status.st_uid != os.geteuid():
            raise PermissionError(
                errno.EACCES, f"{source} belongs to another user, who would lose access to it"
            ) from None
        shutil.copy2(source, copy, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            sync_file(copy)


def _exchange_names(a: Path, b: Path) -> bool:
    """Exchange two paths atomically. Return False if the system cannot do this."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))


def _remove_folder(folder: Path) -> None:
    """Remove a folder; but if a volume has been mounted in it, leave everything."""
    if not os.path.lexists(folder) or _mounts_in(folder):
        return
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # so that a read-only folder can be emptied
    shutil.rmtree(folder, ignore_errors=True)


def _is_writable(path: Path) -> bool:
    """Return whether this user may write to a file or a folder."""
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
