"""Replace a folder in one step, and read one version of a folder that others replace.

On Linux, one system call exchanges two folders. Elsewhere this takes two renames. If a process is
killed between them, the old folder has another name, and `recover_dir` renames it back.

Any number of threads and processes may do this with one folder. They exclude each other by the lock
of `folders`, so that a folder beside the target is abandoned if nobody holds its lock. `carry` adds
the files of the old folder that stay to the new one.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ligermodels.converters.carry import Carry
from ligermodels.converters.files import sync_folder
from ligermodels.converters.folders import (
    ATTEMPTS,
    NOT_SUPPORTED,
    PAUSE,
    LockedFolder,
    is_writable,
    mounts_in,
    remove_folder,
    wait_for,
)
from ligermodels.errors import CheckpointError, LigerError

T = TypeVar("T")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAMES = 5.0  # seconds in which a process surely makes its second rename
_SETTLED = 0.001  # seconds in which a call ends that has found a folder by its name


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
        remove_folder(fresh)
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
                with LockedFolder(aside) as folder:
                    if folder.locked or late:
                        folder.rename(aside, target)
                    else:
                        busy = True
            except BlockingIOError:
                busy = not late
            except OSError:  # It has no longer this name, or this user may not rename it.
                pass
        if busy:
            time.sleep(PAUSE)
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
    for _ in range(ATTEMPTS):
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
        f"{folder}: the folder was replaced each of the {ATTEMPTS} times that it was read; try "
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


def check_replaceable(target: Path) -> None:
    """Raise OSError if `replace_dir` would refuse this path, which is resolved."""
    try:
        while True:
            found = os.stat(target)
            if not stat.S_ISDIR(found.st_mode):
                raise FileExistsError(errno.EEXIST, "the path is a file, not a folder")
            if is_writable(target):
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
    mounts = mounts_in(folder)
    if folder in mounts:
        raise OSError(errno.EBUSY, "the folder is a mount point; pass a folder inside it")
    if mounts:
        raise OSError(
            errno.EBUSY,
            f"a volume is mounted in the folder, at {mounts[0]}; unmount it, or pass another "
            "folder",
        )


def _beside(target: Path, kind: str) -> list[Path]:
    """Return the folders of a kind, "saving" or "replaced", that belong to `target`."""
    pattern = re.compile(re.escape(f".{target.name}.{kind}-") + "[0-9a-f]{16}")
    try:
        names = filter(pattern.fullmatch, os.listdir(target.parent))
    except OSError:
        return []
    return [path for name in names if (path := target.with_name(name)).is_dir()]


def _new_folder(target: Path) -> tuple[Path, LockedFolder]:
    while True:
        fresh = target.with_name(f".{target.name}.saving-{secrets.token_hex(8)}")
        fresh.mkdir()
        try:
            lock = LockedFolder(fresh)
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
            with contextlib.suppress(OSError), LockedFolder(path) as folder:
                # While there is no target, the replaced folder is the only one.
                needed = kind == "replaced" and not target.exists()
                if folder.locked and folder.is_at(path) and not needed:
                    remove_folder(path)


def _replace(target: Path, fresh: Path, owned: Callable[[str], bool]) -> None:
    """Move `fresh` to `target`, add the other files of the old folder, and remove that."""
    written = set(os.listdir(fresh))

    def carried(name: str) -> bool:
        return not owned(name) and name not in written

    for _ in range(ATTEMPTS):
        if _replace_once(target, fresh, carried):
            return sync_folder(target.parent)
    raise OSError(errno.EBUSY, f"other processes make and remove {target} all the time")


def _replace_once(target: Path, fresh: Path, carried: Callable[[str], bool]) -> bool:
    """Return False if another process has made the target just now, so that this must repeat."""
    recover_dir(target)
    with wait_for(target) as exists:
        if not exists:
            sync_folder(fresh)
            with wait_for(target.parent):
                if os.path.lexists(target) or _beside(target, "replaced"):
                    return False
                os.rename(fresh, target)
            return True
        _refuse_mounts(target)
        carry = Carry(carried)
        carry.over(target, fresh)
        shutil.copymode(target, fresh)
        sync_folder(fresh)
        old = _swap(fresh, target)
        try:
            # Others may have changed the old folder until now.
            _refuse_mounts(old)
            carry.over(old, target)
            # Calls of theirs that found it before the swap may still wait for its kernel lock.
            for _ in range(ATTEMPTS):
                time.sleep(_SETTLED)
                if not carry.over(old, target):
                    break
        except BaseException:
            _swap_back(old, target, fresh)
            raise
        carry.finish(old, target)
        remove_folder(old)
    return True


def _swap(fresh: Path, target: Path) -> Path:
    """Move `fresh` to `target`; return the place of the old folder."""
    if _exchange(fresh, target):
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
        _exchange(fresh, target)
        return
    with wait_for(target.parent):
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
    if code in NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
