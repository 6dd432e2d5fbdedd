"""The fused linears: frozen combinations, saved tensors and the memory of backward.

`test_grid.py` tests sizes, layouts, inputs that are frozen alone and outputs used alone.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import glu_linear
from tests.kernels.checks import as_tuple, compare, random
from tests.kernels.conftest import INTERPRETING
from tests.kernels.ops_table import CASES, leaves
from tests.kernels.scratch import peak_scratch
from tests.layers.saved import SavedBytes

SIZE = (64,), 32
OPS = ("norm_linear", "glu_linear")


@pytest.mark.parametrize("name", ["norm_linear", "norm_qkv_rope"])
@pytest.mark.parametrize(
    "frozen",
    [
        ("x", "residual"),
        ("x", "residual", "norm_weight"),
        ("norm_weight", "weight", "bias"),
        ("x", "residual", "weight", "bias"),
    ],
    ids=str,
)
def test_several_frozen_inputs(float32_place, name, frozen) -> None:
    case = CASES[name]
    made = case.inputs((2, 3), 8)
    compare(case.function, case.formula, made, float32_place, frozen=frozen, constant=case.constant)


def test_what_is_kept_for_backward(compiled_place) -> None:
    """Only what a gradient that is wanted needs: the sum, not the norm's output, or nothing."""
    rows, width = 64, 32

    def kept(op: str, *trained: str) -> float:
        case = CASES[op]
        made = leaves(case, case.inputs(*SIZE), compiled_place)
        for name, x in made.items():
            if isinstance(x, torch.Tensor):
                x.requires_grad_(name in trained)
        with SavedBytes(
            *(made[name] for name in ("weight", "norm_weight") if name in made)
        ) as saved:
            outputs = case.function(**made)
        del outputs
        return saved.total / compiled_place.dtype.itemsize

    everything = ("x", "residual", "norm_weight", "weight", "bias", "gate_up")
    statistics = 8 * rows / compiled_place.dtype.itemsize  # 1 / rms of each row
    assert kept("norm_linear", *everything) <= rows * width + statistics
    assert kept("glu_linear", *everything) == rows * 2 * width
    assert kept("norm_linear") == kept("glu_linear") == 0
    assert kept("norm_linear", "bias") == kept("glu_linear", "bias") == 0
    for op in OPS:
        assert kept(op, "weight", "bias") == rows * width
    assert kept("glu_linear", "gate_up") == rows * 2 * width


def test_the_peak_of_backward(float32_place) -> None:
    """The gradient of gate_up takes its memory, and the product that of the product's gradient."""
    rows, width = 64, 32
    case = CASES["glu_linear"]
    inputs = leaves(case, case.inputs(*SIZE), float32_place)
    weight, leaf = inputs["weight"], inputs["gate_up"]

    def peak(consume: bool) -> int:
        def forward() -> torch.Tensor:
            return glu_linear(leaf * 1.0, weight, consume=consume)

        return peak_scratch(forward, (leaf, weight))[1]

    gate_up = rows * 2 * width * 4
    apart, inside = peak(False), peak(True)
    assert inside <= apart - gate_up
    if INTERPRETING:  # The reference makes tensors of its own.
        product = gate_up // 2  # The interpreter still holds the one of forward.
        assert inside <= gate_up + 2 * product + 8


@pytest.mark.parametrize("name", OPS)
def test_the_gradient_of_the_weight_alone(float32_place, name) -> None:
    """Forward keeps the input of the op before, and backward asks for one gradient of several."""
    case = CASES[name]
    made = leaves(case, case.inputs((3,), 8), float32_place)
    inputs = [made[key] for key in ("weight", "x", "norm_weight", "gate_up") if key in made]
    out = as_tuple(case.function(**made))[0]
    upstream = random(*out.shape, seed=9).to(out)
    (alone,) = torch.autograd.grad(out, inputs[:1], upstream, retain_graph=True)
    together = torch.autograd.grad(out, inputs, upstream)
    torch.testing.assert_close(alone, together[0])
