"""Replace a folder in one step, flush files, and read one version of a folder that others replace.

A save writes a new folder beside the target, and flushes it. Then it locks their parent, links the
files that are not its own into the new folder, exchanges the two folders, moves subfolders that are
not its own to the new one, and removes the old one. On Linux, one system call exchanges two
folders. On other systems, and on file systems that cannot do it, this takes two renames; if a
process is killed between them, `recover_dir` undoes the first.

The lock is flock on an open folder. The system releases it when the process dies. A new folder is
locked while it is written, so that no other save takes it for what a killed one has left. Some
network file systems have no such lock.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ligermodels.errors import CheckpointError, LigerError

T = TypeVar("T")

_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
# The file system has no such locks, or the folder may not be read.
_NO_LOCKS = (*_NOT_SUPPORTED, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EPERM)
_PATIENCE = 60.0  # seconds to wait for another save
_PAUSE = 0.002  # seconds between two attempts to take a lock
_ATTEMPTS = 100  # to read a folder while nobody replaces it
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_BESIDE = re.compile(r"\.(.+)\.(saving|replaced)-[0-9a-f]{16}", re.DOTALL)


class _Lock:
    """An open folder that no other object of this class has open, in any process.

    Attributes: held is False if the file system has no locks, so that others may have it open.
    Raises:
        OSError: there is no such folder; links are not followed.
        BlockingIOError: it is open elsewhere.
    """

    def __init__(self, folder: Path) -> None:
        self.held, self._descriptor = False, -1
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(folder, flags)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held = True
        except OSError as fault:
            self.close()
            if fault.errno not in _NO_LOCKS:
                raise

    def __enter__(self) -> "_Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):  # A fork of this process may have it open, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, in which another save may be at work.

    Raises:
        TimeoutError: another process has held the lock for a minute.
    """
    last = time.monotonic() + _PATIENCE
    while True:
        status = os.stat(folder)
        try:
            lock = _Lock(folder)
        except BlockingIOError:
            if time.monotonic() > last:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another save in {folder} has not ended within {_PATIENCE:g} seconds",
                ) from None
            time.sleep(_PAUSE)
            continue
        with lock:
            if os.path.samestat(status, os.stat(folder)):  # It was not replaced meanwhile.
                yield
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
    with _locked(target.parent):
        _undo_half(target)
        _remove_leftovers(target, owned)
        fresh, lock = _new_folder(target)
    try:
        yield fresh
        sync_folder(fresh)
        with _locked(target.parent):
            _undo_half(target)
            _replace(target, fresh, owned)
            sync_folder(target.parent)
    finally:
        if _is_new(fresh):  # This is after an error.
            shutil.rmtree(fresh, ignore_errors=True)
        lock.close()


def recover_dir(target: Path) -> bool:
    """Return whether the folder exists, after undoing a replacement that was killed half way.

    If another process is between the two renames of a replacement, this waits for it.
    """
    try:
        target = Path(os.path.realpath(target))
        if not os.path.lexists(target) and _beside(target, "replaced"):
            with contextlib.suppress(OSError), _locked(target.parent):
                _undo_half(target)
    except ValueError:  # The path has a null byte, or characters that no path can have.
        return False
    return os.path.isdir(target)


def _undo_half(target: Path) -> None:
    """Rename the old folder back if a process was killed between two renames."""
    aside = _beside(target, "replaced")
    if aside and not os.path.lexists(target):
        os.rename(max(aside, key=lambda path: path.stat().st_ctime_ns), target)


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
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # Open, so that no new folder gets its inode number.
                stack.callback(os.close, os.open(real, os.O_RDONLY))
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


def _version(folder: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def check_replaceable(target: Path) -> None:
    """Raise OSError if `replace_dir` would refuse this path, which is resolved."""
    if not os.path.lexists(target):
        return
    if not stat.S_ISDIR(os.stat(target).st_mode):
        raise FileExistsError(errno.EEXIST, "the path is a file, not a folder")
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, "there is no permission to write to the folder")
    if mounts := _mounts_in(target):
        where = "is a mount point" if target in mounts else f"has a volume mounted at {mounts[0]}"
        raise OSError(errno.EBUSY, f"the folder {where}; pass another folder")
    with contextlib.suppress(FileNotFoundError):  # The current directory may be gone.
        here = Path.cwd()
        if target == here or target in here.parents:
            raise OSError(
                errno.EBUSY,
                "the folder contains the current directory, which would be deleted; run from "
                "elsewhere",
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


def _new_folder(target: Path) -> tuple[Path, _Lock]:
    """Make a locked folder `.NAME.saving-INODE`. After an exchange, the name tells the old one."""
    fresh = target.with_name(f".{target.name}.saving-{secrets.token_hex(8)}")
    fresh.mkdir()
    named = fresh.with_name(f".{target.name}.saving-{fresh.stat().st_ino:016x}")
    try:
        os.rename(fresh, named)
    except OSError:
        fresh.rmdir()
        raise
    return named, _Lock(named)


def _is_new(folder: Path) -> bool:
    """Return whether a folder beside the target is the one that `_new_folder` made."""
    try:
        return folder.name.endswith(f".saving-{folder.stat().st_ino:016x}")
    except OSError:
        return False


def _remove_leftovers(target: Path, owned: Callable[[str], bool]) -> None:
    """Remove the folders that killed saves left beside the target, and that no process holds.

    Subfolders that such a save has not moved from the old folder go to the target.
    """
    for path in [*_beside(target, "saving"), *_beside(target, "replaced")]:
        with contextlib.suppress(OSError), _Lock(path) as lock:
            # An empty one was made by a save that was killed before it gave it its name.
            if lock.held and (_is_new(path) or not os.listdir(path)):
                shutil.rmtree(path)
            elif lock.held and target.exists():
                _empty(path, target, lambda name, status: _is_folder(status) and not owned(name))


def _replace(target: Path, fresh: Path, owned: Callable[[str], bool]) -> None:
    """Move `fresh` to `target`, add what the old folder holds besides, and remove the old one."""
    if not os.path.lexists(target):
        os.rename(fresh, target)
        return
    check_replaceable(target)
    written = set(os.listdir(fresh))

    def is_kept(name: str) -> bool:
        return not owned(name) and name not in written

    linked: dict[str, int] = {}  # name -> inode
    for name in filter(is_kept, sorted(os.listdir(target))):
        status = os.lstat(target / name)
        if not _is_folder(status):
            _link(target / name, fresh / name, status)
            linked[name] = status.st_ino
    shutil.copymode(target, fresh)
    sync_folder(fresh)
    old = _exchange(fresh, target)
    # The save is done, so what fails now is left for the next one. Subfolders move, and what others
    # have just written to the old folder.
    with contextlib.suppress(OSError):
        _empty(old, target, lambda name, new: is_kept(name) and linked.get(name) != new.st_ino)
    if os.path.lexists(old):
        warnings.warn(f"what is not of {target} is in {old} until the next save", stacklevel=2)


def _exchange(fresh: Path, target: Path) -> Path:
    """Move `fresh` to `target`; return the place of the old folder."""
    if _exchange_names(fresh, target):
        return fresh
    aside = target.with_name(fresh.name.replace(".saving-", ".replaced-"))
    try:
        os.rename(target, aside)
        os.rename(fresh, target)
    except BaseException:
        if os.path.lexists(aside) and not os.path.lexists(target):
            os.rename(aside, target)
        raise
    return aside


def _empty(old: Path, target: Path, is_kept: Callable[[str, os.stat_result], bool]) -> None:
    """Move what is kept of an old folder to the target, and remove the rest and the folder.

    What cannot be moved or removed is left for the next save.
    """
    for name in os.listdir(old):
        with contextlib.suppress(OSError):
            status = os.lstat(old / name)
            if is_kept(name, status):
                os.replace(old / name, target / name)
            elif _is_folder(status):
                shutil.rmtree(old / name)
            else:
                os.unlink(old / name)
    sync_folder(target)
    with contextlib.suppress(OSError):
        old.rmdir()


def _is_folder(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode)


def _link(source: Path, copy: Path, status: os.stat_result) -> None:
    """Make a hard link to a file, or copy the file if the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise  # A copy would read from the pipe or the device.
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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file in the format of transformers, and flush it to the disk.

    Raises:
        OSError: the file system reports an error.
    """
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    sync_file(path)


def sync_file(path: Path) -> None:
    """Flush a file's bytes to the disk; callers do this before they rename the file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, if the file system can do this."""
    with contextlib.suppress(OSError):
        sync_file(path)
