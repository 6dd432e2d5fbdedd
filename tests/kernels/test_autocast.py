"""Tests of dtypes under autocast; `test_grid.py` bounds the errors of every op under autocast."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import cross_entropy, linear_cross_entropy, norm_linear
from ligermodels.kernels.autocast import autocast_dtype, cast_operands
from tests.kernels.checks import random
from tests.kernels.conftest import BFLOAT16, INTERPRETING, places
from tests.kernels.ops_table import CASES, leaves, outputs_and_gradients


def test_products_take_the_autocast_dtype(float32_place) -> None:
    low = leaves(CASES["norm_linear"], CASES["norm_linear"].inputs((4,), 24), float32_place)
    with torch.autocast(float32_place.device, dtype=torch.bfloat16):
        out, total = norm_linear(**low)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("place", places(BFLOAT16, gpu=(BFLOAT16,)), indirect=True)
def test_loss_stays_in_float32(place) -> None:
    logits = random(3, 8).to(place.device, torch.bfloat16)
    targets = torch.tensor([1, 2, 3], device=place.device)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        assert cross_entropy(logits, targets)[0].dtype == torch.float32
        loss, *_ = linear_cross_entropy(logits, random(5, 8).to(logits), targets)
        assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", ["norm_linear", "glu_linear"])
def test_float64_is_kept(float32_place, name) -> None:
    """With inputs in float64 and a weight in float32, no product is in 16 bits."""
    case = CASES[name]
    made = leaves(case, case.inputs((4,), 24), float32_place)
    wide = "x" if name == "norm_linear" else "gate_up"
    made[wide] = made[wide].detach().double().requires_grad_()
    results = []
    for enabled in (True, False):
        with torch.autocast(float32_place.device, dtype=torch.bfloat16, enabled=enabled):
            results.append(outputs_and_gradients(case.function, made))
    for inside, outside in zip(*results, strict=True):
        assert inside.dtype == outside.dtype and torch.equal(inside, outside)
    assert results[0][0].dtype == torch.float32


def test_operands() -> None:
    x = torch.ones(2)
    assert autocast_dtype(x) is None
    assert cast_operands(x, x, None) == (x, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype(x) == torch.bfloat16
        assert autocast_dtype(x.double()) is None
        assert autocast_dtype(torch.ones(2, device="meta")) is None
        cast, none = cast_operands(x, x, None)
        assert cast.dtype == torch.bfloat16 and none is None
