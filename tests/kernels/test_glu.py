from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import geglu, glu, swiglu
from ligermodels.kernels.checks import ACTIVATIONS
from tests.kernels.checks import random


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


def test_refusals() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        swiglu(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"gate_up \(\) needs an even last dimension"):
        glu(torch.tensor(1.0))
    with pytest.raises(ValueError, match="activation='relu'; expected one of 'silu'"):
        glu(torch.ones(2, 4), "relu")
    with pytest.raises(ValueError, match="approximate='erf'"):
        geglu(torch.ones(2, 4), "erf")
