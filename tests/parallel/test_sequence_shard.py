"""Ranks have parts of rows; what joins them is tested with processes in tests/parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ligermodels.parallel import context
from ligermodels.parallel.context import SequenceShard
from tests.layers.heads import BATCH, SEQ, VOCAB, data, make


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_have_each_token_once_and_the_same_causal_work(ranks: int) -> None:
    row = torch.arange(12 * ranks)
    parts = [SequenceShard(None, ranks, rank).split(row[None])[0] for rank in range(ranks)]
    assert torch.equal(torch.cat(parts).sort().values, row)
    assert len({int(part.sum()) for part in parts}) == 1


def test_a_row_that_cannot_be_split_is_refused() -> None:
    shard = SequenceShard(None, 3, 0)
    shard.check(12)
    with pytest.raises(ValueError, match="a multiple of 6"):
        shard.check(9)


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_of_parts_is_that_of_the_rows(tmp_path: Path, reduction: str) -> None:
    """Also with the options that have a value for each token."""
    head, _ = make()
    hidden, targets = data()
    weights, picked = torch.rand(BATCH, SEQ + 1), torch.arange(BATCH * (SEQ + 1)) % VOCAB
    hidden, targets = F.pad(hidden, (0, 0, 0, 1)), F.pad(targets, (0, 1))  # an even length
    options = {"token_weights": weights, "alternatives": picked.view(BATCH, -1, 1)}
    options |= {"reduction": reduction, "return_token_stats": ["entropy"]}
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        shard = SequenceShard(dist.group.WORLD, 1, 0)
        found = shard.loss(head, hidden, targets, options)
    finally:
        dist.destroy_process_group()
    for ours, whole in zip(found, head(hidden, targets, **options)):
        if whole is not None:
            torch.testing.assert_close(ours, whole)
