"""The peak of a real step on a CPU, counted by storages, and that of the simulated step."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ligermodels.memory.simulate import simulate
from ligermodels.memory.tracker import Tracker


class StorageTracker(Tracker):
    """Counts storages at the sizes that they have now, since FSDP2 resizes its weights."""

    def __init__(self) -> None:
        super().__init__("cpu", seen="cpu")
        self.peak_now = 0

    def reach(self, extra: int = 0) -> None:
        storages = [reference() for reference, *_ in self.live.values()]
        total = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak_now = max(self.peak_now, total)


def error_of_prediction(
    model: Any,
    seq: int = 12,
    *,
    steps: int = 1,
    wrapped: Any = None,
    held: Mapping[Any, torch.Tensor] | None = None,
    **options: Any,
) -> float:
    """Return the predicted peak of a step, relative to the real one, less 1.

    Args:
        steps: real ones, of which that with the lowest peak counts.
        wrapped: what runs the model's step. By default it is the model.
        held: tensors besides, which exist once the model has made two steps.
        options: those of `simulate`.
    """
    ids = torch.ones(2, seq, dtype=torch.int64)
    like = model.meta_labels(2, seq)
    labels = ids if like.shape == ids.shape else torch.ones_like(like, device="cpu")

    def step() -> None:
        (wrapped or model)(ids, labels=labels).loss.backward()

    for _ in range(2):  # the first ones also allocate what stays
        step()
        model.zero_grad()
    gc.collect()
    peaks = []
    for _ in range(steps):
        tracker = StorageTracker()
        tracker.hold(map(_local, model.parameters()))
        tracker.hold([*model.buffers(), *(held or {}).values(), ids])
        with tracker:
            step()
        peaks.append(tracker.peak_now)
        model.zero_grad()
        gc.collect()
    predicted = simulate(model, 2, seq, device=torch.device("cpu"), **options).peak_bytes
    step()  # FSDP2's hooks are back
    return predicted / min(peaks) - 1


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
