"""Replace a folder in one step. If the process is killed, either the old or the new folder exists.

On Linux, one system call exchanges two folders. Elsewhere this takes two renames. If a process is
killed between them, the old folder has another name, and `recover_dir` renames it back.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from ligermodels.converters.files import sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextlib.contextmanager
def replace_dir(target: Path, owned: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a new folder beside `target` to write into. It replaces `target` after the block.

    The files of the old folder are added to the new one as hard links. Two kinds are left out:
    files that the block wrote, and entries at the top level for whose name `owned` returns True.
    If the block raises, the old folder does not change.

    Args: target is a resolved path. It may be absent; its parents are created.
    Raises:
        OSError: `target` cannot be replaced, or the file system reports an error.
    """
    if target.exists() and not target.is_dir():
        raise FileExistsError(errno.EEXIST, "the path is a file, not a folder")
    if target.is_dir() and os.path.ismount(target):
        raise OSError(errno.EBUSY, "the folder is a mount point; pass a folder inside it")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise OSError(
            errno.EBUSY,
            "the folder contains the current directory, which would be deleted; run from elsewhere",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    recover_dir(target)
    _remove_leftovers(target)
    fresh = target.with_name(f"{_prefix(target)}{os.getpid()}")
    fresh.mkdir()
    try:
        yield fresh
        if target.is_dir():
            _carry_over(target, fresh, owned)
            shutil.copymode(target, fresh)
        sync_folder(fresh)
        _swap_in(fresh, target)
    finally:
        # After an error this is the incomplete new folder. After an exchange it is the old folder.
        shutil.rmtree(fresh, ignore_errors=True)


def recover_dir(target: Path) -> None:
    """Rename the old folder back if a process was killed between the two renames."""
    aside = _aside(Path(os.path.abspath(target)))  # The path "." has no name.
    with contextlib.suppress(OSError):
        if aside.is_dir() and not target.exists():
            os.rename(aside, target)


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-{socket.gethostname()}-"


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _remove_leftovers(target: Path) -> None:
    """Remove the new folders that processes on this host left behind when they died."""
    prefix = _prefix(target)
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    if target.exists() and _aside(target).exists():
        shutil.rmtree(_aside(target), ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # An earlier replacement in this process left the folder behind.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _carry_over(old: Path, new: Path, owned: Callable[[str], bool] | None = None) -> None:
    for path in old.iterdir():
        copy = new / path.name
        if os.path.lexists(copy) or (owned is not None and owned(path.name)):
            continue
        if path.is_dir() and not path.is_symlink():
            copy.mkdir()
            _carry_over(path, copy)
            shutil.copystat(path, copy)
        else:
            _link(path, copy)


def _link(source: str | Path, copy: str | Path) -> None:
    """Make a hard link to a file, or copy the file if the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)


def _swap_in(fresh: Path, target: Path) -> None:
    """Move `fresh` to `target`. Afterwards `fresh` is the old folder or does not exist."""
    if not target.exists():
        os.rename(fresh, target)
    elif not _exchange(fresh, target):
        aside = _aside(target)
        os.rename(target, aside)
        try:
            os.rename(fresh, target)
        except OSError:
            os.rename(aside, target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(target.parent)


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
