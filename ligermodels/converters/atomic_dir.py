"""Replacing a folder in one step: whenever the process is killed, the old or the new one is there.

Linux lets two folders trade places in one system call. Elsewhere it takes two renames; a process
that is killed between them leaves the old folder under another name, and `recover_dir` renames it
back.
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
    """A new folder beside `target` to write into, which replaces it when the block has ended.

    Files of the old folder are added to the new one as hard links, except those that the block
    wrote and those at the top for whose name `owned` is true. If the block raises, the old folder
    stays as it is.

    Args: target is a resolved path; it may be absent, and its parents are made.
    Raises:
        OSError: whatever the file system says.
    """
    if target.exists() and not target.is_dir():
        raise FileExistsError(errno.EEXIST, "is a file, not a folder")
    if target.is_dir() and os.path.ismount(target):
        raise OSError(errno.EBUSY, "is a mount point; give a folder inside it")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise OSError(
            errno.EBUSY, "the current directory lies in it and would vanish; run from elsewhere"
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
        # This is the half-written new folder, or the old one after an exchange.
        shutil.rmtree(fresh, ignore_errors=True)


def recover_dir(target: Path) -> None:
    """Rename the old folder back after a replacement that was killed between its two renames."""
    aside = _aside(Path(os.path.abspath(target)))  # "." has no name to derive one from
    with contextlib.suppress(OSError):
        if aside.is_dir() and not target.exists():
            os.rename(aside, target)


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-{socket.gethostname()}-"


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _remove_leftovers(target: Path) -> None:
    """Remove the new folders of replacements whose process on this host has died."""
    prefix = _prefix(target)
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    if target.exists() and _aside(target).exists():
        shutil.rmtree(_aside(target), ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # The folder is of an earlier replacement in this process.
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
    """Give a file a second name; copy it where the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)


def _swap_in(fresh: Path, target: Path) -> None:
    """Put `fresh` where `target` is; afterwards `fresh` is the old folder or does not exist."""
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
    """Let two paths trade places atomically; return False where the system cannot do it."""
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
