"""Change what the system offers to this process, for a test that runs in a fork.

Each function returns False where the machine does not allow the change.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# These constants are from <sched.h> and <sys/mount.h>.
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


def own_mounts() -> bool:
    """Let this process mount what no other process sees, and what vanishes with it."""
    if sys.platform != "linux" or os.geteuid() != 0 or _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    return bool(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0)


def mount_folder(source: Path, folder: Path) -> bool:
    """Mount a folder or file at another path, also within one file system."""
    return bool(_libc.mount(os.fsencode(source), os.fsencode(folder), None, _MS_BIND, None) == 0)
