"""Ranks have parts of rows; what joins them is tested with processes in tests/parallel."""

from __future__ import annotations

import pytest
import torch

from ligermodels.parallel import context
from ligermodels.parallel.context import SequenceShard


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_have_each_token_once_and_the_same_causal_work(ranks: int) -> None:
    row = torch.arange(12 * ranks)
    parts = [SequenceShard(None, ranks, rank).split(row[None])[0] for rank in range(ranks)]
    assert torch.equal(torch.cat(parts).sort().values, row)
    assert len({int(part.sum()) for part in parts}) == 1


def test_a_row_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 6"):
        SequenceShard(None, 3, 0).check(9)


def test_gradients_of_whole_rows_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two other ranks add half of the last digit of bfloat16 each."""
    tiny = torch.finfo(torch.bfloat16).eps / 2

    def gather(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        out.copy_(torch.cat([x, x]))

    def scatter(out: torch.Tensor, parts: torch.Tensor, group: object) -> None:
        small = torch.full_like(out, tiny)
        out.copy_(parts[: len(out)] + small + small)

    monkeypatch.setattr(context, "all_gather", gather)
    monkeypatch.setattr(context, "reduce_scatter", scatter)
    x = torch.ones(1, 4, 3, dtype=torch.bfloat16, requires_grad=True)
    whole = SequenceShard(None, 2, 0).whole(x)
    whole.backward(torch.ones_like(whole))
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, torch.full_like(x, 1 + 2 * tiny))
