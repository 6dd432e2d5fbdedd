"""Products of experts with weights of few bits and with thin weights, by both implementations."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ligermodels.adapters import QuantizedLinear
from ligermodels.kernels.dispatch import select
from tests.kernels.tolerances import assert_close

STARTS = [0, 0, 5, 5, 40]  # two experts have no rows


def by_formula(x: Tensor, stack: Tensor) -> Tensor:
    rows = [x[first:end] for first, end in pairwise(STARTS)]
    return torch.cat([each @ weight for each, weight in zip(rows, stack.to(x.dtype))])


@pytest.mark.parametrize(
    ("bits", "features", "columns", "rows_in_tile"),
    [
        (4, 24, 128, 99),  # all columns of a tile have one scale
        (4, 12, 16, 99),  # they have several
        (4, 9, 96, 99),  # a half of 48 columns ends inside of a tile
        (8, 24, 80, 99),
        (4, 12, 16, 0),  # the weight is converted before
        (8, 12, 16, 0),
    ],
)
def test_weights_of_few_bits(
    compiled_place, bits, features, columns, rows_in_tile, monkeypatch
) -> None:
    place = compiled_place
    ops = select("frozen_experts", torch.empty(1, device=place.device, dtype=place.dtype))
    if hasattr(ops, "ROWS_IN_TILE"):
        monkeypatch.setattr(ops, "ROWS_IN_TILE", rows_in_tile)
    torch.manual_seed(0)
    linear = nn.Linear(columns, 4 * features, bias=False)
    few = QuantizedLinear(linear, bits).to(place.device)
    codes, scales, *rest = few.expert_weight()
    strided = [x.repeat_interleave(2, -1)[:, ::2] for x in (codes, scales)]
    weight = (*strided, *rest)
    exact = few.dequantized(place.dtype).double().unflatten(0, (4, -1))
    starts = torch.tensor(STARTS, dtype=torch.int32, device=place.device)
    experts = torch.tensor([[1, 3], [3, 3], [0, 1]], dtype=torch.int32, device=place.device)
    x = torch.randn(3, columns, device=place.device).to(place.dtype)
    found = ops.quantized_expert_linear_few(x, *weight[:3], experts, 4)
    eager, right = (
        torch.stack([row @ stack[e].T for row, own in zip(rows, experts.tolist()) for e in own])
        for rows, stack in ((x, exact.to(place.dtype)), (x.double(), exact))
    )
    assert_close("few rows", found, eager, right)
    for transposed, stack in ((True, exact.mT), (False, exact)):
        x = torch.randn(40, stack.shape[1], device=place.device).to(place.dtype)
        found = ops.quantized_expert_linear(x, *weight[:3], starts, transposed)
        assert found.dtype == place.dtype
        assert_close("x W", found, by_formula(x, stack), by_formula(x.double(), stack))


@pytest.mark.parametrize("rank, width", [(3, 40), (48, 33)])
def test_thin_weights(place, rank, width) -> None:
    torch.manual_seed(0)
    starts = torch.tensor(STARTS, dtype=torch.int32, device=place.device)
    options = {"device": place.device, "dtype": place.dtype}
    sizes = (40, width), (40, rank), (4, width, rank)
    out, x, stack = (torch.randn(*size).to(**options) for size in sizes)
    eager, exact = out + by_formula(x, stack.mT), out.double() + by_formula(x.double(), stack.mT)
    select("frozen_experts", x).expert_linear_add(out, x, stack.mT, starts)
    assert_close("the sum", out, eager, exact)
