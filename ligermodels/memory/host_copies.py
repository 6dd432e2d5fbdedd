"""Copies between a device and pinned host memory: those of a GPU, and those of a simulated one."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ligermodels.errors import ConfigError, first_line
from ligermodels.memory.pinned_pool import Part


class Copies(Protocol):
    """The operations of a device that an `Offloader` uses. Tests replace them."""

    def slab(self, nbytes: int) -> Tensor | None:
        """Allocate host memory."""

    def to_host(self, source: Tensor, parts: list[Part]) -> Any:
        """Start to copy bytes into parts of slabs; return an event that marks the end."""

    def to_device(self, target: Tensor, parts: list[Part], after: Any) -> Any:
        """Start to copy parts of slabs into `target` after an event; return one for the end."""

    def stream(self) -> Any:
        """Return the stream that computes now in this thread."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make a stream wait for an event."""


class CudaCopies:
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

    def to_host(self, source: Tensor, parts: list[Part]) -> torch.cuda.Event:
        # The kernels that compute the source come first. So do all reloads, because one of them
        # may still read the pieces, whose last owner has given them back.
        self._outward.wait_stream(self.stream())
        self._outward.wait_stream(self._inward)
        with torch.cuda.stream(self._outward):
            for device_part, host_part in pairs(source, parts):
                host_part.copy_(device_part, non_blocking=True)
            return self._outward.record_event()

    def to_device(
        self, target: Tensor, parts: list[Part], after: torch.cuda.Event
    ) -> torch.cuda.Event:
        # The target's memory was free for the compute stream, whose kernels may still use it.
        self._inward.wait_stream(self.stream())
        self._inward.wait_event(after)
        with torch.cuda.stream(self._inward):
            for device_part, host_part in pairs(target, parts):
                device_part.copy_(host_part, non_blocking=True)
            return self._inward.record_event()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)


class NoCopies:
    """Stands for the copies of a simulated GPU."""

    def slab(self, nbytes: int) -> None:
        return None

    def to_host(self, source: Tensor, parts: list[Part]) -> None:
        return None

    def to_device(self, target: Tensor, parts: list[Part], after: Any) -> None:
        return None

    def stream(self) -> None:
        return None

    def wait(self, stream: Any, event: Any) -> None:
        return None


def pairs(tensor: Tensor, parts: list[Part]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide a row of bytes as its host memory is divided; the last part may be too long."""
    done = 0
    for slab, offset, size in parts:
        assert slab is not None
        piece = tensor[done : done + size]
        yield piece, slab[offset : offset + piece.numel()]
        done += size
