"""Copies between a device and pinned host memory: those of a GPU, and those of a simulated one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import ConfigError, first_line
from ligermodels.memory.pinned_pool import HostBlock


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
