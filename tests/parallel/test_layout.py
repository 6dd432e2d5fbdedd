"""The parts of sharded parameters. Sharded models are in tests/parallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ligermodels.parallel import layout as layout_module
from ligermodels.parallel.layout import (
    IndexRange,
    TensorSlice,
    TensorSplit,
    gathers_to_rank_0,
    local_slices,
    whole_tensor,
)


def described(parts: list[TensorSlice]) -> list[tuple[list[float], int, int, bool]]:
    return [(part.values.flatten().tolist(), part.row, part.column, part.is_copy) for part in parts]


def mesh_of(rank: int) -> Any:
    return SimpleNamespace(get_local_rank=lambda: rank)


def test_a_parameter_that_is_not_sharded_is_one_part() -> None:
    weight = torch.arange(6.0).reshape(3, 2)
    (part,) = local_slices(weight)
    assert (part.row, part.column, part.is_copy) == (0, 0, False)
    assert part.values.data_ptr() == weight.data_ptr()
    assert whole_tensor(weight).equal(weight)


def test_runs_of_rows_are_parts() -> None:
    runs = (IndexRange(2, 0, 2), IndexRange(7, 2, 1, is_copy=True))
    cut = TensorSplit((9,), 0, ((IndexRange(0, 0, 3),), runs), mesh_of(1))
    parts = local_slices(torch.tensor([5.0, 6.0, 7.0]), cut)
    assert described(parts) == [([5.0, 6.0], 2, 0, False), ([7.0], 7, 0, True)]


def test_a_run_of_columns_is_a_part() -> None:
    cut = TensorSplit((1, 4), 1, ((IndexRange(0, 0, 2),), (IndexRange(2, 0, 2),)), mesh_of(1))
    assert described(local_slices(torch.ones(1, 2), cut)) == [([1.0, 1.0], 0, 2, False)]


def test_parts_are_views() -> None:
    local = torch.zeros(2)
    for part in local_slices(local, TensorSplit((4,), 0, ((IndexRange(1, 0, 2),),), mesh_of(0))):
        part.values.fill_(3)
    assert local.tolist() == [3, 3]


def test_a_shard_without_elements_and_runs_of_other_rows_are_no_parts() -> None:
    assert local_slices(torch.empty(0, 2)) == []
    runs = (IndexRange(0, 0, 2), IndexRange(6, 2, 0), IndexRange(8, 2, 1))
    cut = TensorSplit((9,), 0, (runs,), mesh_of(0))
    assert [part.row for part in local_slices(torch.ones(3), cut)] == [0, 8]
    assert gathers_to_rank_0(torch.ones(2))


def test_the_whole_is_made_of_the_runs_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of another rank's rows is not sent again."""
    whole, sent = torch.arange(10.0).reshape(5, 2), []
    runs = (
        (IndexRange(0, 0, 2), IndexRange(4, 2, 1)),
        (IndexRange(2, 0, 2), IndexRange(4, 2, 1, is_copy=True)),
    )

    def broadcast(piece: torch.Tensor, source: int, group: object) -> None:
        sent.append((source, piece.shape[0]))
        if source == 1:
            piece.copy_(whole[2:4])

    monkeypatch.setattr(layout_module.dist, "broadcast", broadcast)
    monkeypatch.setattr(layout_module.dist, "get_global_rank", lambda group, rank: rank)
    mesh = SimpleNamespace(get_local_rank=lambda: 0, get_group=lambda: None)
    found = TensorSplit((5, 2), 0, runs, mesh).whole(whole[[0, 1, 4]])
    assert found.equal(whole) and sent == [(0, 2), (0, 1), (1, 2)]
