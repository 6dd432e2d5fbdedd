"""Measure a step's peak memory, without its inputs and the gradients of its leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Event(NamedTuple):
    """An allocation at an address; a negative size means that it is freed."""

    address: int
    size: int


class CpuTrace(TorchDispatchMode):
    """Records when the outputs of every operator are allocated and freed.

    It does not see memory that an operator allocates and frees internally.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.live: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {address(x) for x in tensors((*args, *kwargs.values()))}
        out = function(*args, **kwargs)
        for x in tensors((out,)):
            at = address(x)
            if at and at not in given and at not in self.live:
                storage = x.untyped_storage()
                self.live.add(at)
                self.events.append(Event(at, storage.nbytes()))
                weakref.finalize(storage, self._given_back, at, storage.nbytes())
        return out

    def _given_back(self, address: int, size: int) -> None:
        self.live.discard(address)
        self.events.append(Event(address, -size))

    def mark(self) -> int:
        return len(self.events)


class GpuTrace:
    """Records the history of the CUDA allocator."""

    def __enter__(self) -> GpuTrace:
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(context=None, clear_history=True)
        return self

    def __exit__(self, *_) -> None:
        self.events = self._read()
        torch.cuda.memory._record_memory_history(enabled=None)

    def _read(self) -> list[Event]:
        events, live = [], {}
        traces = torch.cuda.memory._snapshot()["device_traces"]  # one for each visible device
        for entry in traces[torch.cuda.current_device()]:
            at = entry.get("addr")
            if entry["action"] == "alloc":
                live[at] = entry["size"]
                events.append(Event(at, entry["size"]))
            elif entry["action"] == "free_completed" and at in live:
                events.append(Event(at, -live.pop(at)))
        return events

    def mark(self) -> int:
        return len(self._read())


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments; torch's trees would take most of the time."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors(x)


def address(x: Tensor) -> int:
    """Return the address of x's storage."""
    return x.untyped_storage().data_ptr()


def running(events: list[Event], apart: Iterable[int]) -> list[int]:
    """Return the bytes held after each event, without the last allocations at `apart`."""
    last = {event.address: i for i, event in enumerate(events) if event.size > 0}
    skipped = {last[at] for at in apart if at in last}
    return list(accumulate(0 if i in skipped else event.size for i, event in enumerate(events)))


def peak_scratch(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[int, int]:
    """Return the peak bytes of forward, and of the backward of the sum of its result.

    Inputs and the leaves' gradients do not count. A gradient is left out from the moment of its
    allocation. Subtracting its size from the peak instead would hide scratch if it is allocated
    after the peak.
    """
    on_gpu = leaves[0].is_cuda
    if on_gpu:  # The first run compiles kernels and allocates the workspaces of libraries.
        forward().sum().backward()
    for leaf in leaves:
        leaf.grad = None
    trace = GpuTrace() if on_gpu else CpuTrace()
    with trace:
        total = forward().sum()
        mark = trace.mark()
        total.backward()
        if on_gpu:
            torch.cuda.synchronize()
    apart = [address(leaf.grad) for leaf in leaves if leaf.grad is not None]
    held = [0, *running(trace.events, apart)]
    return max(held[: mark + 1]), max(held[mark:])
