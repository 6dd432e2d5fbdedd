"""Tests of dtypes under autocast; `test_grid.py` bounds the errors of every op under autocast."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import cross_entropy, glu_linear, linear_cross_entropy, norm_linear
from ligermodels.kernels.autocast import autocast_dtype, cast_operands
from tests.kernels.checks import random
from tests.kernels.conftest import BFLOAT16, INTERPRETING, places
from tests.kernels.ops_table import CASES, leaves
from tests.kernels.ops_table import norm_linear as norm_linear_inputs


def test_products_take_the_autocast_dtype(float32_place) -> None:
    low = leaves(CASES["norm_linear"], norm_linear_inputs((4,), 24), float32_place)
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


def test_norm_linear_keeps_float64(float32_place) -> None:
    """With x in float64 and a weight in float32, no product is in 16 bits, also in backward."""
    made = norm_linear_inputs((4,), 24)
    low = leaves(CASES["norm_linear"], made, float32_place)
    low["x"] = low["x"].detach().double().requires_grad_()
    with torch.autocast(float32_place.device, dtype=torch.bfloat16):
        out, total = norm_linear(**low)
        (out.sum() + total.sum()).backward()
    assert (out.dtype, total.dtype) == (torch.float32, torch.float64)
    names = ("x", "weight")
    gradients = [low[name].grad for name in names]
    assert [grad.dtype for grad in gradients] == [torch.float64, torch.float32]
    expected, total = norm_linear(**low)
    wanted = torch.autograd.grad(expected.sum() + total.sum(), [low[name] for name in names])
    assert torch.equal(out, expected)
    for grad, want in zip(gradients, wanted):
        assert torch.equal(grad, want)


def test_glu_linear_keeps_float64(float32_place) -> None:
    device = float32_place.device
    gate_up = random(3, 16, seed=1).to(device).requires_grad_()
    weight = random(5, 8, seed=2).to(device, torch.float32).requires_grad_()
    results = []
    for enabled in (True, False):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            out = glu_linear(gate_up, weight)
            results.append((out, *torch.autograd.grad(out.sum(), (gate_up, weight))))
    for inside, outside in zip(*results):
        assert inside.dtype == outside.dtype and torch.equal(inside, outside)


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
