"""Kept tensors in host memory: they leave the GPU behind compute, and return a layer ahead.

Forward copies what a layer saves into pinned memory, on a separate stream. The GPU memory is
released when the next layer ends, after the compute stream has waited for the copies. When backward
reaches a layer, the tensors of the layer below start to return, on another stream.

All of this happens at fixed points of the program: no copy is asked whether it is complete, and
the host never waits. Whether a tensor leaves, and where it lies, is therefore the same in each run.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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


_LEAST_BYTES = MIB  # smaller storages stay, since a copy would cost more than it frees

HOLD = 3
"""The number of layers that may run before a layer's tensors leave GPU memory."""


class OffloadStats(NamedTuple):
    """The pinned memory of an `Offloader`, in bytes, and what did not fit into it."""

    pinned: int  # allocated
    in_use: int  # of these, what tensors take now
    peak: int  # the most that tensors have taken at any time
    refused: int  # what stayed on the GPU in the present forward, because the budget was full


class Offloader:
    """Holds the kept tensors of layers in pinned host memory between forward and backward.

    These tensors stay on the GPU: parameters and their views, storages under 1 MiB, the tensors
    given to `forward_pass`, and what exceeds the host budget. A storage leaves once, however many
    views of it are saved, and it leaves whole.

    Args:
        device: a GPU, or "meta" for a simulated one.
        host_budget: bytes of pinned memory at most. Each rank of a host has its own budget.
        copies: the device's operations. By default they are those of the GPU. Those of a simulated
            GPU pin and copy nothing, but tensors are released and allocated at the same points.
    Raises:
        ConfigError: there is no pinned memory, because there is no GPU, or the budget is under
            1 MiB.
    """

    def __init__(
        self, device: torch.device | str, host_budget: int, copies: Copies | None = None
    ) -> None:
        if host_budget < MIB:
            raise ConfigError(
                f"offload: host_budget={host_budget} bytes; expected {MIB} (1 MiB) or more, "
                "or a plan without layers in host memory"
            )
        self.device = torch.device(device)
        if copies is None:
            if self.device.type != "cuda" or not torch.cuda.is_available():
                raise ConfigError(
                    f"offload: device {self.device} has no pinned host memory to offload to; use a "
                    "GPU, or a plan without layers in host memory"
                )
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            copies = CudaCopies(self.device)
        self.copies, self.host_budget = copies, host_budget
        self.pool = PinnedPool(host_budget, copies.slab)
        self._refused = 0
        self._pass = _Pass(())
        self._layer: _Layer | None = None  # an attribute, since hooks may run in other threads

    def __reduce__(self) -> Any:
        # A copy of the model that owns this gets its own offloader.
        return Offloader, (self.device, self.host_budget)

    def forward_pass(self, shared: Iterable[Tensor] = ()) -> None:
        """Begin a new forward pass. Earlier passes may still have their backward before them.

        Args: shared: tensors that stay on the GPU although layers save them, because others hold
            them, too: angles and masks, and parameters where they are not `nn.Parameter`.
        """
        self._pass.release(keep=())
        self._pass = _Pass(shared)
        self._refused = 0

    @contextmanager
    def layer(self, index: int, host: bool = True) -> Iterator[None]:
        """Return a context for the forward of a layer, whose saved tensors it packs.

        Put every layer into such a context, the ones that stay on the GPU with host=False: the
        end of a layer releases the layers before it, and its backward starts the return of the
        layer below. What the last layer saves stays on the GPU.

        Args: index: the layer's number, in ascending order.
        """
        if not torch.is_grad_enabled():
            yield
            return
        outer = self._layer
        self._layer = layer = _Layer(self._pass, index, host)
        self._pass.enter(index)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._layer = outer
            # End the forward of the layer; release the ones more than `HOLD` layers before it.
            layer.within.release(keep=layer.within.resident[-HOLD:])

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> "_Handle":
        """Take a kept tensor of the present layer; return a handle, which owns the copy of it."""
        layer = self._layer
        stored = self._store(tensor, layer) if layer is not None and layer.host else None
        return _Handle(tensor, stored, layer)

    @torch.no_grad()
    def unpack(self, handle: "_Handle") -> Tensor:
        """Return the tensor of a handle, any number of times, in any thread.

        Raises: RuntimeError if the tensor was changed in place after `pack`.
        """
        handle.check()
        if handle.layer is not None:
            handle.layer.within.visit(handle.layer.index)
        return handle.tensor()

    def stats(self) -> OffloadStats:
        """Return what the pinned memory holds now."""
        pool = self.pool
        return OffloadStats(pool.held, pool.held - pool.free_bytes(), pool.peak, self._refused)

    def _store(self, tensor: Tensor, layer: "_Layer") -> "_Stored | None":
        """Return the copy of a tensor's storage in host memory, or None if the tensor stays."""
        if (
            type(tensor) is not Tensor
            or tensor.layout != torch.strided
            or tensor.device != self.device
            or tensor.is_conj()
            or tensor.is_neg()
            or isinstance(tensor._base, nn.Parameter)
        ):
            return None
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        key = StorageWeakRef(storage)
        if nbytes < _LEAST_BYTES or key in layer.within.stay:
            return None
        stored = layer.within.stored.get(key)
        if stored is None or stored.changed():
            blocks = self.pool.take(nbytes)
            if blocks is None:
                self._refused += nbytes
                layer.within.stay.add(key)
                return None
            stored = layer.within.stored[key] = _Stored(self, tensor, blocks, layer.index)
        layer.within.of_layer[layer.index].append(weakref.ref(stored))
        return stored


class _Handle:
    """The handle that the autograd graph keeps instead of a tensor.

    It refers to the tensor only without its grad_fn, since the graph must not refer to itself.
    """

    def __init__(self, tensor: Tensor, stored: "_Stored | None", layer: "_Layer | None") -> None:
        self.layer, self.stored = layer, stored
        self.version = tensor._version
        if stored is None:
            self.kept = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        else:
            self.kept = _version_counter(tensor)
            self.geometry = tensor.shape, tensor.stride(), tensor.storage_offset()

    def check(self) -> None:
        """Raise as autograd does without hooks, if the tensor was changed in place."""
        if self.kept._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of {self.kept.dtype} is at version "
                f"{self.kept._version}; expected version {self.version} instead"
            )

    def tensor(self) -> Tensor:
        if self.stored is None:
            return self.kept
        return self.stored.elements(self.kept.dtype).as_strided(*self.geometry)


class _Stored:
    """The copy of one storage in host memory. It lives as long as the handles that refer to it.

    `resident` holds the same bytes in GPU memory: at first the storage itself, and in backward the
    reloaded one. `event` tells when the last copy from or to `resident` is complete.
    """

    def __init__(
        self, owner: Offloader, tensor: Tensor, blocks: list[PinnedBlock], index: int
    ) -> None:
        self.owner, self.blocks, self.index = owner, blocks, index
        self.counter, self.version = _version_counter(tensor), tensor._version
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.resident: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.resident.set_(storage)
        self.resident_version = self.resident._version
        self.stream = owner.copies.stream()
        self.event = owner.copies.to_host(self.resident, owner.pool.host_blocks(blocks))

    def changed(self) -> bool:
        """Return whether the tensor was changed in place since the copy."""
        return self.counter._version != self.version

    def release(self) -> None:
        """Give up the GPU memory, which the compute stream may use after the copy is complete."""
        if self.resident is not None:
            self.owner.copies.wait(self.stream, self.event)
            self.resident = None

    def load(self) -> Tensor:
        """Return the bytes in GPU memory; start to copy them there if they are not."""
        # A backward that owns its saved tensor may have overwritten it, as its version tells.
        if self.resident is None or self.resident._version != self.resident_version:
            owner = self.owner
            resident = torch.empty(self.nbytes, dtype=torch.uint8, device=owner.device)
            self.stream = owner.copies.stream()
            host_blocks = owner.pool.host_blocks(self.blocks)
            self.event = owner.copies.to_device(resident, host_blocks, self.event)
            self.resident, self.resident_version = resident, resident._version
        return self.resident

    def elements(self, dtype: torch.dtype) -> Tensor:
        """Return the storage as one row of elements, which the present stream may read."""
        resident = self.load()
        copies = self.owner.copies
        copies.wait(copies.stream(), self.event)
        return resident[: self.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)

    def __del__(self) -> None:
        self.release()
        self.owner.pool.give_back(self.blocks)


@dataclass(frozen=True)
class _Layer:
    within: "_Pass"
    index: int
    host: bool


class _Pass:
    """One forward and its backward: what each layer stored.

    It refers to stored tensors weakly. Those that the graph gives up are gone at once.
    """

    def __init__(self, shared: Iterable[Tensor]) -> None:
        self.stay = {
            StorageWeakRef(tensor.untyped_storage())
            for tensor in shared
            if type(tensor) in (Tensor, nn.Parameter)
        }
        self.stored: weakref.WeakValueDictionary[StorageWeakRef, _Stored] = (
            weakref.WeakValueDictionary()
        )
        self.below: dict[int, int | None] = {}  # the layers in order, each with the one before it
        self.of_layer: dict[int, list[weakref.ref[_Stored]]] = {}
        self.resident: list[int] = []  # the layers whose tensors may be in GPU memory
        self.visited: int | None = None  # the layer that backward has reached

    def enter(self, index: int) -> None:
        assert index not in self.below, "a layer runs twice in a pass"
        self.below[index] = next(reversed(self.below), None)
        self.of_layer[index] = []
        self.resident.append(index)

    def visit(self, index: int) -> None:
        """Backward needs the tensors of a layer: load them, and those of the layer below."""
        if index == self.visited:
            return
        self.visited = index
        wanted = [layer for layer in (index, self.below[index]) if layer is not None]
        self.release(keep=wanted)
        self.resident = wanted
        for layer in wanted:
            for stored in self._alive(layer):
                stored.load()

    def release(self, keep: Collection[int]) -> None:
        """Give up the GPU memory of all layers but those in `keep`."""
        for layer in self.resident:
            if layer not in keep:
                for stored in self._alive(layer):
                    # Another layer may have stored it before, and still needs it.
                    if stored.index == layer:
                        stored.release()
        self.resident = [layer for layer in self.resident if layer in keep]

    def _alive(self, layer: int) -> list[_Stored]:
        return [stored for ref in self.of_layer[layer] if (stored := ref()) is not None]


def _version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor whose `_version` follows the tensor's, without holding its memory."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter
