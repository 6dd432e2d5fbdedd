"""Replacing a folder in one step: killed at any moment, it is the old one or the new one."""

import contextlib
import ctypes
import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextlib.contextmanager
def replacing(target: Path, owned: Callable[[str], bool]) -> Iterator[Path]:
    """A new sibling folder to write into; it takes `target`'s place when the block ends well.

    Files of the old folder are carried over as hard links, but for those at its top whose name is
    `owned`, and those that the block wrote. If the block raises, the old folder stays.

    Args: target, resolved, may be absent; its parents are made.
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
    recover(target)
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
        # By now either the half-written new folder or, exchanged, the old one.
        shutil.rmtree(fresh, ignore_errors=True)


def recover(target: Path) -> None:
    """Undo a replacement that was killed between its two renames, where they were needed."""
    aside = _aside(Path(os.path.abspath(target)))  # "." has no name to derive one from
    with contextlib.suppress(OSError):
        if aside.is_dir() and not target.exists():
            os.rename(aside, target)


def sync_file(path: Path) -> None:
    """Have a file's bytes on the disk before anything is renamed to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """`sync_file` of a folder's entries; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        sync_file(path)


def _prefix(target: Path) -> str:
    return f".{target.name}.saving-{socket.gethostname()}-"


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _remove_leftovers(target: Path) -> None:
    """Folders of saves onto `target` whose process on this host has died."""
    prefix = _prefix(target)
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
    if target.exists() and _aside(target).exists():
        shutil.rmtree(_aside(target), ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # a save of ours that has ended
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
    """The same file under a second name; a copy where the file system has no hard links."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, copy, follow_symlinks=False)


def _swap_in(fresh: Path, target: Path) -> None:
    """Put `fresh` where `target` is; afterwards `fresh` is the old folder, or gone."""
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
    """Let two paths trade places atomically; False where the system cannot."""
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
