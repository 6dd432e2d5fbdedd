"""Ranks have parts of rows; what joins them is tested with processes in tests/parallel."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers import sequence_shard
from ligermodels.layers.sequence_shard import SequenceShard


def test_gradients_of_whole_rows_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two other ranks add half of the last digit of bfloat16 each."""
    tiny = torch.finfo(torch.bfloat16).eps / 2

    def gather(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        out.copy_(torch.cat([x, x]))

    def scatter(out: torch.Tensor, parts: torch.Tensor, group: object) -> None:
        small = torch.full_like(out, tiny)
        out.copy_(parts[: len(out)] + small + small)

    monkeypatch.setattr(sequence_shard, "all_gather", gather)
    monkeypatch.setattr(sequence_shard, "reduce_scatter", scatter)
    x = torch.ones(1, 4, 3, dtype=torch.bfloat16, requires_grad=True)
    whole = SequenceShard(None, 2, 0).whole(x)
    whole.backward(torch.ones_like(whole))
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, torch.full_like(x, 1 + 2 * tiny))
