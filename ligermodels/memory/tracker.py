"""The count of bytes and of work of the operators that run on meta tensors.

A dispatch mode sees every operator. It counts the bytes of the storages that are alive, as CUDA's
caching allocator rounds them, and the work.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligermodels.memory.rates import Work
from ligermodels.memory.torch_private import (
    Block,
    CachingAllocator,
    accumulates,
    expandable_segments,
    is_wrapper,
    plain,
    scratch,
)

_aten = torch.ops.aten


# The position of the first factor of each product; the second factor follows it.
_PRODUCTS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
    "aten::_grouped_mm": 0,
    "ligermodels::wide_product": 0,
    "ligermodels::accumulate_product": 1,
}
_UNWRITTEN = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_UNWRITTEN |= {"aten::new_empty_strided", "aten::set_"}
_LOOKUPS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}
# Their floating point operations are counted apart.
_ATTENTION = ("_scaled_dot_product_", "torch_attn::_varlen_attn")


@dataclass
class Phase:
    """A part of a step: its bytes and its work."""

    before: int  # bytes that exist when it begins
    peak: int = 0  # the most bytes in it
    after: int = 0  # bytes that exist when it ends
    work: Work = field(default_factory=Work)
    largest: int = 0  # bytes of the largest block that begins in it


class _PlainSizes:
    """An allocator of a CPU: a block has the size of the request."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def allocate(self, size: int) -> Block:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        return Block(0, size, False)

    def free(self, block: Block) -> None:
        self.allocated -= block.size


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages, and the work, of the operators that run under it.

    Args:
        device_type: "cuda" counts what CUDA's caching allocator and the operators' scratch take;
            "cpu" counts the plain sizes.
        seen: the device of the tensors that count, "meta" or the real one.
    """

    def __init__(self, device_type: str, seen: str = "meta") -> None:
        super().__init__()
        self.on_gpu, self.seen = device_type == "cuda", seen
        # By storage: a weak reference to it, its allocator and its block.
        self.live: dict[int, tuple[Any, CachingAllocator | _PlainSizes, Block]] = {}
        self.uncounted: set[int] = set()  # storages
        self.allocators: dict[str, CachingAllocator | _PlainSizes] = {}  # of streams
        self.stream = "compute"
        self.phases: dict[str, Phase] = {}
        self.phase = Phase(0)

    @property
    def work(self) -> Work:
        """The work of the phase that is running."""
        return self.phase.work

    def enter(self, name: str) -> None:
        """Begin a phase; later peaks and work count for it."""
        self.leave()
        self.phase = self.phases.setdefault(name, Phase(self.bytes, self.bytes))

    def leave(self) -> None:
        """End the phase that is running."""
        self.phase.after = self.bytes

    def hold(self, values: Iterable[Any]) -> int:
        """Count the storages of the tensors among values that exist already; return their bytes."""
        before = self.bytes
        for x in plain(*values):
            self._allocate(x)
        return self.bytes - before

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Take memory from the allocator of another stream, which keeps what it reserves."""
        before, self.stream = self.stream, name
        try:
            yield
        finally:
            self.stream = before

    @property
    def allocator(self) -> CachingAllocator | _PlainSizes:
        """The allocator of the stream that is running."""
        if self.stream not in self.allocators:
            self.allocators[self.stream] = (
                CachingAllocator(expandable=expandable_segments()) if self.on_gpu else _PlainSizes()
            )
        return self.allocators[self.stream]

    @property
    def bytes(self) -> int:
        """The bytes that are allocated now."""
        return sum(allocator.allocated for allocator in self.allocators.values())

    @property
    def reserved(self) -> int:
        """The bytes that the allocators have reserved."""
        return sum(allocator.reserved for allocator in self.allocators.values())

    def block_bytes(self, x: Tensor) -> int:
        """Return the bytes that a tensor's storage takes."""
        return self.live[x.untyped_storage()._cdata][2].size

    def _allocate(self, x: Tensor) -> None:
        if x.device.type != self.seen:
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.live or key in self.uncounted or size == 0:
            return
        reference = weakref.ref(storage, lambda _: self._free(key))
        self.live[key] = reference, self.allocator, self.allocator.allocate(size)
        self.phase.largest = max(self.phase.largest, size)

    def _free(self, key: int) -> None:
        _, allocator, block = self.live.pop(key)
        allocator.free(block)

    def reach(self, extra: int = 0) -> None:
        """Count what is allocated now, and bytes that are allocated besides and freed again."""
        block = self.allocator.allocate(extra) if extra else None
        self.phase.largest = max(self.phase.largest, extra)
        self.phase.peak = max(self.phase.peak, self.bytes)
        if block is not None:
            self.allocator.free(block)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented  # its own operators follow
        if func.is_view and args[0].is_meta:  # most calls of a simulation; a view takes nothing
            return func(*args, **kwargs)
        if func is _aten.nonzero.default and args[0].is_meta:
            # At most every element.
            out = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif func is _aten.add.Tensor and accumulates(args[0]):
            out = args[0].add_(args[1])
        elif func is _aten.addmm_.default:
            out = args[0]  # torch checks its shapes in Python, which is slow, and adapters call it
        else:
            out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        name = func.name().partition(".")[0]
        self._count(name, func._schema.is_mutable, args, given, made)
        for x in made:
            self._allocate(x)
        self.reach(scratch(name, args) if self.on_gpu else 0)
        return out

    def _count(
        self,
        name: str,
        mutates: bool,
        args: tuple[Any, ...],
        given: list[Tensor],
        made: list[Tensor],
    ) -> None:
        if name in _PRODUCTS:
            a, b = args[_PRODUCTS[name] :][:2]
            # Hopper multiplied float8 1.9 times as fast, in Llama-3-8B's blocks.
            each = 1 if name == "aten::_scaled_mm" else 2
            self.work.product_flops += each * a.numel() * b.shape[-1]
        elif name in _LOOKUPS:
            self.work.moved_bytes += 2 * sum(map(_bytes, made))
        elif name not in _UNWRITTEN and not any(part in name for part in _ATTENTION):
            known = {x.untyped_storage()._cdata for x in given}
            fresh = [x for x in made if x.untyped_storage()._cdata not in known]
            if fresh or mutates:
                written = fresh or made
                self.work.moved_bytes += sum(map(_bytes, given)) + sum(map(_bytes, written))

    def launched(self, tensors: Iterable[Any]) -> None:
        """Count a launch of one of this library's kernels."""
        self.work.moved_bytes += sum(_bytes(x) for x in tensors if isinstance(x, Tensor))


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements. Those of an expanded tensor count once."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
