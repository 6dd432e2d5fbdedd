from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import swiglu
from tests.kernels import formulas
from tests.kernels.checks import LAYOUTS, check_repeatable, compare, random

SHAPES = [(3, 66), (2, 3, 32), (1, 2), (5, 2), (1, 4100), (0, 16), (8,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu(place, shape) -> None:
    compare(swiglu, formulas.swiglu, {"gate_up": random(*shape, scale=2.0)}, place)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(place, layout) -> None:
    made = {"gate_up": random(4, 6, 20)}
    compare(swiglu, formulas.swiglu, made, place, layout=layout)


def test_far_from_zero(place) -> None:
    """A gate at which exp would overflow: the value and the gradient stay finite."""
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], dtype=place.dtype, device=place.device)
    gate_up = torch.cat((gate, torch.ones_like(gate))).requires_grad_()
    out = swiglu(gate_up)
    out.sum().backward()
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0], dtype=place.dtype, device=place.device)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-6)
    assert torch.isfinite(gate_up.grad).all()


def test_twice_over_a_retained_graph(place) -> None:
    check_repeatable(swiglu, {"gate_up": random(3, 8)}, place)


def test_refusal() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        swiglu(torch.ones(2, 3))
