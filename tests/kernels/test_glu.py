from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import geglu, glu, swiglu
from ligermodels.kernels.glu import ACTIVATIONS
from tests.kernels import formulas
from tests.kernels.checks import LAYOUTS, check_repeatable, compare, random

SHAPES = [(3, 66), (2, 3, 32), (1, 2), (5, 2), (1, 4100), (0, 16), (8,)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glu(place, shape, activation) -> None:
    made = {"gate_up": random(*shape, scale=2.0), "activation": activation}
    compare(glu, formulas.glu, made, place)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(place, layout, activation) -> None:
    made = {"gate_up": random(4, 6, 20), "activation": activation}
    compare(glu, formulas.glu, made, place, layout=layout)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_from_zero(place, activation) -> None:
    """A gate at which exp would overflow: the value and the gradient stay finite."""
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], dtype=place.dtype, device=place.device)
    gate_up = torch.cat((gate, torch.ones_like(gate))).requires_grad_()
    out = glu(gate_up, activation)
    out.sum().backward()
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0], dtype=place.dtype, device=place.device)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-6)
    slope = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], dtype=place.dtype, device=place.device)
    torch.testing.assert_close(gate_up.grad[:5], slope, rtol=1e-2, atol=1e-6)


def test_names(place) -> None:
    gate_up = random(3, 10).to(place.dtype).to(place.device)
    assert torch.equal(swiglu(gate_up), glu(gate_up))
    assert torch.equal(geglu(gate_up), glu(gate_up, "gelu_tanh"))
    assert torch.equal(geglu(gate_up, "none"), glu(gate_up, "gelu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_twice_over_a_retained_graph(place, activation) -> None:
    check_repeatable(glu, {"gate_up": random(3, 8), "activation": activation}, place)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        swiglu(torch.ones(2, 3))
    with pytest.raises(ValueError, match="activation='relu'; expected one of 'silu'"):
        glu(torch.ones(2, 4), "relu")
    with pytest.raises(ValueError, match="approximate='erf'"):
        geglu(torch.ones(2, 4), "erf")
