"""Tests of the fused linears at real output widths; test_ops_on_gpu tests real row lengths."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import glu_linear, norm_linear, norm_qkv_rope
from ligermodels.kernels.checks import ACTIVATIONS
from tests.kernels import formulas, test_fused_linear
from tests.kernels.checks import compare, random
from tests.kernels.conftest import Place

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CONSTANT = ("cos", "sin")


@pytest.fixture(params=DTYPES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    return Place("cuda", request.param)


def check(op, formula, made: dict, place: Place, **options) -> None:
    compare(op, formula, made, place, exact_place="cuda", **options)


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
