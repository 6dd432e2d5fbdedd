"""Lock folders, remove them, and tell what is mounted in them.

The lock of a folder is flock, a lock on an open folder. It moves with the folder when that is
renamed, and the system releases it when the process dies. Some network file systems have no such
lock.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # This is not POSIX, and there are no locks.
    fcntl = None  # type: ignore[assignment]

NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
ATTEMPTS = 100  # to read or replace a folder while nobody else replaces it
PAUSE = 0.002  # seconds between two attempts to take a lock
# The file system has no such locks, or the folder may not be read.
_NO_LOCKS = (*NOT_SUPPORTED, errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EPERM)
_PATIENCE = 600.0  # seconds; the lock is held while files of the old folder are linked or copied


class LockedFolder:
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

    def __enter__(self) -> "LockedFolder":
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
        with wait_for(target.parent):
            if self.is_at(path) and not os.path.lexists(target):
                os.rename(path, target)

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
        TimeoutError: another process holds the lock all the time.
        OSError: the path is no folder.
    """
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            folder = LockedFolder(path)
        except FileNotFoundError:
            yield False
            return
        except BlockingIOError:
            if time.monotonic() > last:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another save to {path} has not ended within {_PATIENCE:g} seconds",
                ) from None
            time.sleep(PAUSE)
            continue
        with folder:
            if folder.is_at(path):
                yield True
                return


def mounts_in(folder: Path) -> list[Path]:
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


def is_abandoned(path: Path) -> bool:
    """Return whether a folder that a save made is locked by nobody."""
    try:
        with LockedFolder(path) as folder:
            return folder.locked
    except (BlockingIOError, NotADirectoryError):
        return False


def remove_folder(folder: Path) -> None:
    """Remove a folder; but if a volume has been mounted in it, leave everything."""
    if not os.path.lexists(folder) or mounts_in(folder):
        return
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IRWXU)  # so that a read-only folder can be emptied
    shutil.rmtree(folder, ignore_errors=True)


def is_writable(path: Path) -> bool:
    """Return whether this user may write to a file or a folder."""
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
