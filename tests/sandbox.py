"""Change what the system offers to this process, for a test that runs in a fork.

Each function returns False where the machine does not allow the change.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# These constants are from <sched.h>, <sys/mount.h>, <linux/prctl.h> and <linux/seccomp.h>.
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EINVAL = 22
_RENAMEAT2 = 316  # on x86-64
_RENAME_EXCHANGE = 2


def own_mounts() -> bool:
    """Let this process mount what no other process sees, and what vanishes with it."""
    if sys.platform != "linux" or os.geteuid() != 0 or _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    return bool(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0)


def mount_tmpfs(folder: Path, size: int = 1 << 20) -> bool:
    """Mount a file system of `size` bytes in memory."""
    options = f"size={size}".encode()
    return bool(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options) == 0)


def mount_folder(source: Path, folder: Path) -> bool:
    """Mount a folder or file at another path, also within one file system."""
    return bool(_libc.mount(os.fsencode(source), os.fsencode(folder), None, _MS_BIND, None) == 0)


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jump_if_true", ctypes.c_ubyte),
        ("jump_if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def without_exchange() -> bool:
    """Make the exchange of two paths fail with EINVAL, as file systems do that cannot do it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    load, equal, give = 0x20, 0x15, 0x06
    instructions = (_Instruction * 6)(
        _Instruction(load, 0, 0, 0),  # the number of the system call
        _Instruction(equal, 0, 3, _RENAMEAT2),
        _Instruction(load, 0, 0, 16 + 4 * 8),  # its fifth argument, the flags
        _Instruction(equal, 0, 1, _RENAME_EXCHANGE),
        _Instruction(give, 0, 0, _ERRNO | _EINVAL),
        _Instruction(give, 0, 0, _ALLOW),
    )
    program = _Program(len(instructions), instructions)
    return bool(
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0
    )
