"""Run a function in a child that is killed, or finds the disk full, at a chosen system call.

ptrace traces the child, so these are real system calls, made by Python, torch or libc. Only calls
that change the disk count, because the disk does not change between two of them. This needs Linux
on x86-64.
"""

import ctypes
import errno
import os
import platform
import signal
import sys
from collections.abc import Callable

if os.name == "posix":
    import posix

AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64"

# Calls by number that take space on a disk, and so can find it full.
_GROWING = dict(
    zip(
        (1, 18, 20, 40, 74, 75, 77, 82, 83, 86, 88, 258, 264, 265, 266, 285, 316, 326),
        (
            "write pwrite64 writev sendfile fsync fdatasync ftruncate rename mkdir link symlink "
            "mkdirat renameat linkat symlinkat fallocate renameat2 copy_file_range"
        ).split(),
        strict=True,
    )
)
_SHRINKING = dict(
    zip(
        (76, 84, 87, 90, 91, 263, 268, 280, 452),
        "truncate rmdir unlink chmod fchmod unlinkat fchmodat utimensat fchmodat2".split(),
        strict=True,
    )
)
_OPEN, _OPENAT = 2, 257
_CHANGING_FLAGS = os.O_CREAT | os.O_TRUNC
# These constants are from <sys/ptrace.h> and <sys/user.h>.
_TRACEME, _PEEKUSER, _POKEUSER, _SYSCALL, _SETOPTIONS = 0, 3, 6, 24, 0x4200
_OPTIONS = 1 | 0x100000  # mark stops at system calls; kill the child if the tracer ends
_RAX, _RDX, _RSI, _ORIG_RAX = 80, 96, 104, 120


if AVAILABLE:
    _ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    _ptrace.restype = ctypes.c_long
    _ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def leave(status: int) -> None:
    """End this process at once; coverage's own os._exit would first write a file of data."""
    posix._exit(status)


def _name_of_change(pid: int) -> str | None:
    """Return the name of the change that the next call of `pid` makes to the disk, or None."""
    number = _ptrace(_PEEKUSER, pid, _ORIG_RAX, 0)
    if number in (_OPEN, _OPENAT):
        flags = _ptrace(_PEEKUSER, pid, _RDX if number == _OPENAT else _RSI, 0)
        return "open" if flags & _CHANGING_FLAGS else None
    return _GROWING.get(number) or _SHRINKING.get(number)


def run(
    work: Callable[[], None], call: int, *, full: str | None = None
) -> tuple[int | None, str | None]:
    """Run `work` in a child up to change number `call` of the disk, counted from 0.

    Args:
        full: with None, the child is killed before the call. With "once", the call fails as on a
            full disk if it takes space; with "from then on", all such later calls fail as well.

    Returns:
        The child's exit status (0: done, 1: an exception, None: killed), and the name of the call,
        or None if the child made fewer calls.
    """
    child = os.fork()
    if child == 0:
        status = 1
        os.fsync = posix.fsync  # tests/conftest.py leaves it out
        try:
            _ptrace(_TRACEME, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            status = 0
        finally:
            leave(status)
    os.waitpid(child, 0)
    if _ptrace(_SETOPTIONS, child, 0, _OPTIONS):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise PermissionError(ctypes.get_errno(), "ptrace is not permitted here")
    seen, entering, failing, stopped_at = 0, True, False, None
    forward = 0
    while True:
        _ptrace(_SYSCALL, child, 0, forward)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status), stopped_at
        if os.WIFSIGNALED(status):
            return None, stopped_at
        forward = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            forward = os.WSTOPSIG(status)
        elif entering:
            entering = False
            change = _name_of_change(child)
            if change is None:
                continue
            if seen == call:
                stopped_at = change
                if full is None:
                    os.kill(child, signal.SIGKILL)
            due = seen == call if full == "once" else seen >= call
            if full and due and change not in _SHRINKING.values():
                failing = True
                _ptrace(_POKEUSER, child, _ORIG_RAX, ctypes.c_ulong(-1).value)
            seen += 1
        else:
            entering = True
            if failing:
                failing = False
                _ptrace(_POKEUSER, child, _RAX, ctypes.c_ulong(-errno.ENOSPC).value)
