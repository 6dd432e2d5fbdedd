from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import geglu, glu, swiglu
from ligermodels.kernels.checks import ACTIVATIONS
from tests.kernels.checks import random


def test_far_from_zero(place) -> None:
    """The value and the gradient stay finite at a gate for which exp would overflow."""
    made = {"dtype": place.dtype, "device": place.device}
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], **made)
    expected = torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0], **made)
    slope = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], **made)
    for activation in ACTIVATIONS:
        gate_up = torch.cat((gate, torch.ones_like(gate))).requires_grad_()
        out = glu(gate_up, activation)
        out.sum().backward()
        for ours, want in ((out, expected), (gate_up.grad[:5], slope)):
            assert torch.allclose(ours, want, rtol=1e-2, atol=1e-6), activation


def test_names(float32_place) -> None:
    gate_up = random(3, 10).float().to(float32_place.device)
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
