"""The parts of sharded parameters. Sharded models are in tests/parallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ligermodels.models.parts import Part, Run, TensorShard, local_parts, whole_tensor


def described(parts: list[Part]) -> list[tuple[list[float], int, int, bool]]:
    return [(part.values.flatten().tolist(), part.row, part.column, part.is_copy) for part in parts]


def mesh_of(rank: int) -> Any:
    return SimpleNamespace(get_local_rank=lambda: rank)


def test_a_parameter_that_is_not_sharded_is_one_part() -> None:
    weight = torch.arange(6.0).reshape(3, 2)
    (part,) = local_parts(weight)
    assert (part.row, part.column, part.is_copy) == (0, 0, False)
    assert part.values.data_ptr() == weight.data_ptr()
    assert whole_tensor(weight).equal(weight)


def test_runs_of_rows_are_parts() -> None:
    runs = (Run(2, 0, 2), Run(7, 2, 1, is_copy=True))
    cut = TensorShard((9,), 0, ((Run(0, 0, 3),), runs), mesh_of(1))
    parts = local_parts(torch.tensor([5.0, 6.0, 7.0]), cut)
    assert described(parts) == [([5.0, 6.0], 2, 0, False), ([7.0], 7, 0, True)]


def test_a_run_of_columns_is_a_part() -> None:
    cut = TensorShard((1, 4), 1, ((Run(0, 0, 2),), (Run(2, 0, 2),)), mesh_of(1))
    assert described(local_parts(torch.ones(1, 2), cut)) == [([1.0, 1.0], 0, 2, False)]


def test_parts_are_views() -> None:
    local = torch.zeros(2)
    for part in local_parts(local, TensorShard((4,), 0, ((Run(1, 0, 2),),), mesh_of(0))):
        part.values.fill_(3)
    assert local.tolist() == [3, 3]
