"""The blocks that CUDA's caching allocator gives out and the memory that it reserves for them.

Source: c10/cuda/CUDACachingAllocator.cpp, with its default settings or with expandable segments. A
request takes the smallest free block that is large enough; the rest of the block is split off, if
it is not too small. If no block fits, a new segment comes from the GPU. Expandable segments are
two, for small and for large blocks, which grow at their ends. Nothing goes back to the GPU.
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
    """Gives blocks for requests; `allocated` and `reserved` are bytes.

    Args: expandable: whether segments are expandable.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.reserved = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # small or not, by their keys
        self._last: dict[bool, Block | None] = {True: None, False: None}  # of expandable segments
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """Return a block for a request of `size` bytes."""
        size = max(-(-size // 512), 1) * 512
        small = size <= _MIB
        pool = self._free[small]
        place = bisect_left(pool, (size, -1), key=lambda block: block.key)
        if place + 1 < len(pool) and pool[place] is self._last[small]:
            place += 1  # the last block counts as large as it may become
        found = pool.pop(place) if place < len(pool) else None
        if found is not None:
            block = found
        else:
            block = self._grown(size, small) if self.expandable else self._segment(size, small)
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > _MIB:
            after = Block(block.address + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = after
            elif self.expandable:
                self._last[small] = after
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
        if self.expandable and block.after is None:
            self._last[block.small] = block
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

    def _grown(self, size: int, small: bool) -> Block:
        """Let an expandable segment grow until its last block, if that is free, has the size."""
        last, part = self._last[small], (2 if small else 20) * _MIB
        if last is not None and last.free:
            self._remove(last)
            block = last
        else:
            end = int(not small) << 60 if last is None else last.address + last.size
            block = Block(end, 0, small, True, last)
            if last is not None:
                last.after = block
        more = -(-(size - block.size) // part) * part
        block.size += more
        self.reserved += more
        self._last[small] = block
        return block

    def _insert(self, block: Block) -> None:
        insort(self._free[block.small], block, key=lambda other: other.key)

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, block.key, key=lambda other: other.key))


def expandable_segments() -> bool:
    """Return whether CUDA's caching allocator is set to expandable segments.

    Before it runs out of memory, it then also moves free memory to where a block is needed.
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
