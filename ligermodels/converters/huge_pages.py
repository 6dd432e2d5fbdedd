"""Allocate CPU tensors in pages of 2 MiB, where Linux has them.

Linux provides the memory of a page when it is first written, and 2 MiB at once take less than half
of the time of 512 pages of 4 KiB. A loaded checkpoint is written once, so this is a large part of
the time of a load.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor

# Smaller tensors would waste most of their last page of 4 KiB.
_LEAST_BYTES = 1 << 16


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a new tensor without values, as `torch.empty` does.

    A large one on the CPU has its own mapping. Linux joins adjacent mappings to one area, in
    which a huge page may hold parts of several tensors. The memory of malloc is no such area: it
    writes a header before each tensor, and the small page of the header takes the place of a huge
    one. Where the administrator has disabled huge pages, the tensor lies in small ones. The storage
    of a mapping cannot be resized.

    Args: shape, dtype: of the tensor; device: on another device than the CPU, this is torch.empty.
    Raises: what `torch.empty` raises, such as RuntimeError if there is not enough memory.
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    wanted = torch.device(device).type == "cpu" and nbytes >= _LEAST_BYTES
    if not wanted or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # torch's error names the bytes that it needs
        return torch.empty(shape, dtype=dtype, device=device)
    with contextlib.suppress(OSError):  # The kernel was built without huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
