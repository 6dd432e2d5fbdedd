"""The ops at the sizes they are for: real widths."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import (
    add_layer_norm,
    add_rms_norm,
    glu,
    glu_linear,
    layer_norm,
    norm_linear,
    norm_qkv_rope,
    qk_norm_rope,
    rms_norm,
    rope,
)
from ligermodels.kernels.checks import ACTIVATIONS
from tests.kernels import (
    formulas,
    test_fused_linear,
    test_layer_norm,
    test_qk_norm_rope,
    test_rope,
)
from tests.kernels.checks import compare, random
from tests.kernels.conftest import Place

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [576, 1024, 2048, 2304, 3072, 3584, 4096, 5120, 8192, 16384]
CONSTANT = ("cos", "sin")


@pytest.fixture(params=DTYPES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    return Place("cuda", request.param)


def check(op, formula, made: dict, place: Place, **options) -> None:
    compare(op, formula, made, place, exact_place="cuda", **options)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("casting_mode, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_norm_widths(place, width, casting_mode, offset) -> None:
    made = {
        "x": random(3001, width, seed=1),
        "residual": random(3001, width, seed=2),
        "weight": random(width, seed=3),
        "casting_mode": casting_mode,
        "offset": offset,
    }
    check(add_rms_norm, formulas.add_rms_norm, made, place)
    del made["residual"]
    check(rms_norm, formulas.rms_norm, made, place)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_widths(place, width) -> None:
    made = test_layer_norm.inputs((3001, width), True)
    check(add_layer_norm, formulas.add_layer_norm, made, place)
    del made["residual"]
    check(layer_norm, formulas.layer_norm, made, place)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(9, 3, 64), (32, 8, 128), (8, 4, 256)])
def test_rope_heads(place, heads, kv_heads, head_dim) -> None:
    made = test_rope.inputs(2, 130, heads, kv_heads, head_dim)
    check(rope, formulas.rope, made, place, constant=CONSTANT)


@pytest.mark.parametrize("casting_mode, offset", [("llama", 0.0), ("gemma", 1.0)])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(4, 1, 256), (16, 8, 128), (32, 16, 128), (9, 3, 64), (5, 1, 20)]
)
def test_qk_norm_rope_heads(place, heads, kv_heads, head_dim, casting_mode, offset) -> None:
    made = test_qk_norm_rope.inputs(2, 700, heads, kv_heads, head_dim)
    made |= {"casting_mode": casting_mode, "offset": offset}
    check(qk_norm_rope, formulas.qk_norm_rope, made, place, constant=CONSTANT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1536, 8192, 14336, 24576])
def test_glu_widths(place, width, activation) -> None:
    made = {"gate_up": random(100, 2 * width, scale=2.0), "activation": activation}
    check(glu, formulas.glu, made, place)


def test_fused_linears(place) -> None:
    made = test_fused_linear.norm_inputs((2, 200, 1024), 768)
    check(norm_linear, formulas.norm_linear, made, place)
    for activation in ACTIVATIONS:
        made = test_fused_linear.glu_inputs((2, 200, 2048), 768) | {"activation": activation}
        check(glu_linear, formulas.glu_linear, made, place)
    angles = random(1, 200, 32, seed=6)
    made = test_fused_linear.norm_inputs((2, 200, 1024), 24 * 64) | {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "num_heads": 16,
        "num_kv_heads": 4,
    }
    check(norm_qkv_rope, formulas.norm_qkv_rope, made, place, constant=CONSTANT)
