"""The order of the copies between a GPU and the host, on streams that are recorded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.memory.byte_sizes import MIB
from ligermodels.memory.host_copies import CudaCopies
from ligermodels.memory.offload import Offloader


class RecordingStream:
    """A stream of a GPU that only notes what it waits for."""

    def __init__(self, device: Any = None) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)

    wait_event = wait_stream

    def record_event(self) -> tuple[str, RecordingStream]:
        return "done", self


def test_copies_of_a_gpu_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the streams, without a GPU; tests/gpu copies on one."""
    compute = RecordingStream()
    monkeypatch.setattr(torch.cuda, "Stream", RecordingStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    offloader = Offloader(torch.device("cuda"), 10 * MIB)
    copies = offloader.copies
    assert isinstance(copies, CudaCopies)
    assert copies.device == offloader.device == torch.device("cuda", 1)
    outward, inward = copies._outward, copies._inward
    source = torch.arange(10, dtype=torch.uint8)
    slab, target = torch.zeros(16, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    parts = [(slab, 8, 6), (slab, 0, 8)]
    event = copies.to_host(source, parts)
    assert event == ("done", outward) and outward.waits == [compute, inward]
    assert slab[8:14].tolist() == [0, 1, 2, 3, 4, 5] and slab[:4].tolist() == [6, 7, 8, 9]
    assert copies.to_device(target, parts, event) == ("done", inward)
    assert inward.waits == [compute, event] and torch.equal(target, source)
    copies.wait(copies.stream(), event)
    assert compute.waits == [event]

    def refuse(*given: Any, **options: Any) -> Tensor:
        raise RuntimeError("no memory\nof the host")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match=r"4096 more bytes .* cannot be pinned; .* \(no memory\)"):
        copies.slab(4096)
