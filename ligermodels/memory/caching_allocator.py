"""The blocks that CUDA's caching allocator gives out and the memory that it reserves for them.

Source: c10/cuda/CUDACachingAllocator.cpp, with its default settings. A request takes the smallest
free block that is large enough; the rest of the block is split off, if it is not too small. If no
block fits, a new segment comes from the GPU. Nothing goes back to the GPU.
"""

import os
from bisect import bisect_left, insort
from dataclasses import dataclass

import torch

_MIB = 2**20


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None

    @property
    def key(self) -> tuple[int, int]:
        """The order in which free blocks are tried."""
        return self.size, self.address


class CachingAllocator:
    """Gives blocks for requests; `allocated` and `reserved` are bytes."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # small or not, by their keys
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """Return a block for a request of `size` bytes."""
        size = max(-(-size // 512), 1) * 512
        small = size <= _MIB
        pool = self._free[small]
        place = bisect_left(pool, (size, -1), key=lambda block: block.key)
        block = pool.pop(place) if place < len(pool) else self._segment(size, small)
        rest = block.size - size
        if rest >= 512 if small else rest > _MIB:
            after = Block(block.address + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            self._insert(after)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        self.allocated -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = _joined(block.before, block)
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = _joined(block, block.after)
        self._insert(block)

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            length = 2 * _MIB
        elif size < 10 * _MIB:
            length = 20 * _MIB
        else:
            length = -(-size // (2 * _MIB)) * 2 * _MIB
        block = Block(self._next_address, length, small)
        self._next_address += length
        self.reserved += length
        return block

    def _insert(self, block: Block) -> None:
        insort(self._free[block.small], block, key=lambda other: other.key)

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, block.key, key=lambda other: other.key))


def expandable_segments() -> bool:
    """Return whether CUDA's caching allocator is set to expandable segments.

    It then moves free memory to where a block is needed, instead of running out of memory.
    """
    # The environment is read when the allocator starts; torch tells what was read.
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        settings = torch._C._accelerator_getAllocatorSettings()
    else:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        settings = ",".join(os.environ.get(name, "") for name in names)
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def _joined(first: Block, second: Block) -> Block:
    """Make one block of two neighbours."""
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first
