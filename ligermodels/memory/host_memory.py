"""Pinned host memory, in slabs that are reused, and the copies between it and a device."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import ConfigError, first_line
from ligermodels.memory.byte_sizes import MIB

# PyTorch rounds pinned allocations up to powers of two, so that slabs have no other sizes.
_LARGEST_SLAB = 256 * MIB
_ALIGNMENT = 512  # bytes

PinnedBlock = tuple[int, int, int]
"""A block of pinned memory: the slab's number, the offset in it and the length, both in bytes."""

HostBlock = tuple[Tensor | None, int, int]
"""A block of pinned memory with the slab itself, which is None where a GPU is simulated."""


class PinnedPool:
    """Gives out blocks of slabs, and takes them back.

    A tensor may lie in several blocks, so that any free memory serves: slabs never add up to more
    than the budget, and they never hold more than the most that was in use, rounded up to slabs.
    """

    def __init__(self, budget: int, make_slab: Callable[[int], Tensor | None]) -> None:
        self._left = budget // MIB * MIB  # bytes that may still be allocated
        self._make_slab = make_slab
        self._slabs: list[Tensor | None] = []
        self._free: list[PinnedBlock] = []  # sorted; neighbours are joined
        # Garbage collection may return blocks at any time, also while a list above is in use.
        self._returned: deque[list[PinnedBlock]] = deque()
        self.held = self.peak = 0

    def take(self, nbytes: int) -> list[PinnedBlock] | None:
        """Return free blocks of at least nbytes together, or None if the budget is full."""
        needed = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        free = self.free_bytes()
        if free + self._left < needed:
            return None
        while free < needed:
            free += self._grow()
        self.peak = max(self.peak, self.held - free + needed)
        taken = []
        while needed:
            slab, offset, size = self._best(needed)
            used = min(size, needed)
            taken.append((slab, offset, used))
            self._free.remove((slab, offset, size))
            if used < size:
                self._free.append((slab, offset + used, size - used))
            needed -= used
        self._free.sort()
        return taken

    def give_back(self, blocks: list[PinnedBlock]) -> None:
        self._returned.append(blocks)

    def free_bytes(self) -> int:
        """Return the free bytes of the slabs."""
        returned = False
        while self._returned:
            self._free += self._returned.popleft()
            returned = True
        if returned:
            self._free.sort()
            joined = self._free[:1]
            for slab, offset, size in self._free[1:]:
                last_slab, last_offset, last_size = joined[-1]
                if (slab, offset) == (last_slab, last_offset + last_size):
                    joined[-1] = (slab, last_offset, last_size + size)
                else:
                    joined.append((slab, offset, size))
            self._free = joined
        return sum(size for _, _, size in self._free)

    def host_blocks(self, blocks: list[PinnedBlock]) -> list[HostBlock]:
        return [(self._slabs[slab], offset, size) for slab, offset, size in blocks]

    def _grow(self) -> int:
        """Allocate one more slab; return its size."""
        size = min(_LARGEST_SLAB, 1 << (self._left.bit_length() - 1))
        self._slabs.append(self._make_slab(size))
        self._free.append((len(self._slabs) - 1, 0, size))
        self._left -= size
        self.held += size
        return size

    def _best(self, needed: int) -> PinnedBlock:
        """Return the smallest free block that is large enough, or else the largest."""
        return min(self._free, key=lambda block: (block[2] < needed, abs(block[2] - needed)))


class Copies:
    """The operations of a device that an `Offloader` uses. On a simulated GPU they only count.

    Args: count: called as count(to_host, nbytes) at each copy.
    """

    def __init__(self, count: Callable[[bool, int], None]) -> None:
        self.count = count

    def slab(self, nbytes: int) -> Tensor | None:
        """Allocate host memory."""
        return None

    def to_host(self, source: Tensor, host_blocks: list[HostBlock]) -> Any:
        """Start to copy bytes into blocks of slabs; return an event that marks the end."""
        self.count(True, source.nbytes)

    def to_device(self, target: Tensor, host_blocks: list[HostBlock], after: Any) -> Any:
        """Start to copy blocks of slabs into `target` after an event; return one for the end."""
        self.count(False, target.nbytes)

    def stream(self) -> Any:
        """Return the stream that computes now in this thread."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""


class CudaCopies(Copies):
    """Copies between one GPU and pinned memory, on one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)

    def slab(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ConfigError(
                f"offload: {nbytes} more bytes of host memory cannot be pinned; use a smaller "
                f"host_budget ({first_line(error)})"
            ) from error

    def to_host(self, source: Tensor, host_blocks: list[HostBlock]) -> torch.cuda.Event:
        # The kernels that compute the source come first. So do all reloads, because one of them
        # may still read the blocks, whose last owner has given them back.
        self._outward.wait_stream(self.stream())
        self._outward.wait_stream(self._inward)
        with torch.cuda.stream(self._outward):
            for source_bytes, host_bytes in pairs(source, host_blocks):
                host_bytes.copy_(source_bytes, non_blocking=True)
            return self._outward.record_event()

    def to_device(
        self, target: Tensor, host_blocks: list[HostBlock], after: torch.cuda.Event
    ) -> torch.cuda.Event:
        # The target's memory was free for the compute stream, whose kernels may still use it.
        self._inward.wait_stream(self.stream())
        self._inward.wait_event(after)
        with torch.cuda.stream(self._inward):
            for source_bytes, host_bytes in pairs(target, host_blocks):
                source_bytes.copy_(host_bytes, non_blocking=True)
            return self._inward.record_event()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)


def pairs(tensor: Tensor, host_blocks: list[HostBlock]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield slices of a row of bytes with their host memory; the last block may be too long."""
    done = 0
    for slab, offset, size in host_blocks:
        assert slab is not None
        block = tensor[done : done + size]
        yield block, slab[offset : offset + block.numel()]
        done += size
