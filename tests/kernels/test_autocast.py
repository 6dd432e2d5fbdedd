from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import (
    add_layer_norm,
    add_rms_norm,
    cross_entropy,
    glu,
    glu_linear,
    layer_norm,
    linear_cross_entropy,
    norm_linear,
    norm_qkv_rope,
    qk_norm_rope,
    rms_norm,
)
from ligermodels.kernels.autocast import autocast_dtype, cast_operands
from tests.kernels import (
    formulas,
    test_fused_linear,
    test_layer_norm,
    test_linear_cross_entropy,
    test_qk_norm_rope,
    test_rms_norm,
)
from tests.kernels.checks import as_tuple, random

CASES = {
    "rms_norm": (rms_norm, formulas.rms_norm, test_rms_norm.inputs((4, 24), False)),
    "add_rms_norm": (add_rms_norm, formulas.add_rms_norm, test_rms_norm.inputs((4, 24), True)),
    "layer_norm": (layer_norm, formulas.layer_norm, test_layer_norm.inputs((4, 24))),
    "add_layer_norm": (
        add_layer_norm,
        formulas.add_layer_norm,
        test_layer_norm.inputs((4, 24), True),
    ),
    "qk_norm_rope": (qk_norm_rope, formulas.qk_norm_rope, test_qk_norm_rope.inputs(2, 3, 4, 2, 8)),
    "glu": (glu, formulas.glu, {"gate_up": random(4, 24)}),
    "norm_linear": (
        norm_linear,
        formulas.norm_linear,
        test_fused_linear.norm_inputs((4, 24), 8),
    ),
    "norm_qkv_rope": (
        norm_qkv_rope,
        formulas.norm_qkv_rope,
        test_fused_linear.qkv_inputs(),
    ),
    "glu_linear": (
        glu_linear,
        formulas.glu_linear,
        test_fused_linear.glu_inputs((4, 24), 8) | {"activation": "gelu_tanh"},
    ),
    "linear_cross_entropy": (
        test_linear_cross_entropy.ours,
        test_linear_cross_entropy.formula,
        test_linear_cross_entropy.inputs() | {"chunk_size": 9},
    ),
    "linear_cross_entropy none": (
        test_linear_cross_entropy.ours,
        test_linear_cross_entropy.formula,
        test_linear_cross_entropy.inputs() | {"reduction": "none"},
    ),
}


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("name", CASES)
def test_float32_leaves_under_bfloat16_autocast(place, name, inside) -> None:
    """float32 parameters get float32 gradients; the error is that of bfloat16 products."""
    if place.dtype != torch.float32:
        pytest.skip("autocast is for float32 leaves")
    op, formula, made = CASES[name]

    def leaves(dtype: torch.dtype, device: str) -> dict:
        return {
            k: v.to(device, dtype, copy=True).requires_grad_(k not in ("cos", "sin"))
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else (v.to(device) if isinstance(v, torch.Tensor) else v)
            for k, v in made.items()
        }

    low, exact = leaves(torch.float32, place.device), leaves(torch.float64, "cpu")
    with torch.autocast(place.device, dtype=torch.bfloat16):
        outputs = as_tuple(op(**low))
        total = sum(x.float().square().sum() for x in outputs)
        if inside:
            total.backward()
    if not inside:
        total.backward()
    expected = as_tuple(formula(**exact))
    sum(x.square().sum() for x in expected).backward()
    for ours, want in zip(outputs, expected):
        torch.testing.assert_close(ours.double().cpu(), want, rtol=4e-2, atol=4e-2)
    for key, leaf in low.items():
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            assert leaf.grad.dtype == torch.float32, key
            want = exact[key].grad
            error = (leaf.grad.double().cpu() - want).norm() / want.norm()
            assert error < 2e-2, f"{key}: {error:.1e}"


def test_products_take_the_autocast_dtype(place) -> None:
    if place.dtype != torch.float32:
        pytest.skip("autocast is for float32 leaves")
    _, _, made = CASES["norm_linear"]
    low = {
        k: v.float().to(place.device) if isinstance(v, torch.Tensor) else v for k, v in made.items()
    }
    with torch.autocast(place.device, dtype=torch.bfloat16):
        out, total = norm_linear(**low)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)


def test_loss_stays_in_float32(place) -> None:
    if place.dtype != torch.bfloat16:
        pytest.skip("about bfloat16")
    logits = random(3, 8).to(place.device, torch.bfloat16)
    targets = torch.tensor([1, 2, 3], device=place.device)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        assert cross_entropy(logits, targets)[0].dtype == torch.float32
        loss, *_ = linear_cross_entropy(logits, random(5, 8).to(logits), targets)
        assert loss.dtype == torch.float32


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
