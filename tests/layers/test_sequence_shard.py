"""Ranks have parts of rows; what joins them is tested with processes in tests/parallel."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers.sequence_shard import SequenceShard


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
