"""The slices of parameters that a rank holds. Sharded models are in test_shard.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.parallel import layout
from ligermodels.parallel.layout import IndexRange, TensorSplit, local_slices, whole_tensor


def test_slices_are_views_of_the_ranges_of_this_rank() -> None:
    """A range without elements, and one of other rows, is no slice."""

    def found(values: Tensor, *ranges: IndexRange, dim: int = 0) -> list[Any]:
        mesh: Any = SimpleNamespace(get_local_rank=lambda: 1)
        slices = local_slices(values, TensorSplit((9, 4), dim, ((), ranges), mesh))
        assert all(x.values.untyped_storage() is values.untyped_storage() for x in slices)
        return [(x.values.flatten().tolist(), x.row, x.column, x.is_copy) for x in slices]

    rows = (IndexRange(2, 0, 2), IndexRange(6, 2, 0), IndexRange(7, 2, 1, is_copy=True))
    assert found(torch.tensor([5.0, 6.0, 7.0]), *rows) == [
        ([5.0, 6.0], 2, 0, False),
        ([7.0], 7, 0, True),
    ]
    assert found(torch.ones(1, 2), IndexRange(2, 0, 2), dim=1) == [([1.0, 1.0], 0, 2, False)]
    assert found(torch.empty(0, 2), IndexRange(0, 0, 2)) == []
    weight = torch.arange(6.0).reshape(3, 2)
    (only,) = local_slices(weight)
    assert only.values.data_ptr() == weight.data_ptr() and whole_tensor(weight).equal(weight)


def test_the_whole_is_made_of_the_ranges_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of another rank's rows is not sent again."""
    whole, sent = torch.arange(10.0).reshape(5, 2), []
    own = (IndexRange(0, 0, 2), IndexRange(4, 2, 1))
    other = (IndexRange(2, 0, 2), IndexRange(4, 2, 1, is_copy=True))

    def broadcast(piece: Tensor, source: int, group: object) -> None:
        sent.append((source, piece.shape[0]))
        if source == 1:
            piece.copy_(whole[2:4])

    monkeypatch.setattr(layout.dist, "broadcast", broadcast)
    monkeypatch.setattr(layout.dist, "get_global_rank", lambda group, rank: rank)
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 0, get_group=lambda: None)
    found = TensorSplit((5, 2), 0, (own, other), mesh).whole(whole[[0, 1, 4]])
    assert found.equal(whole) and sent == [(0, 2), (0, 1), (1, 2)]
