from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import glu, glu_linear
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


def made_by_an_op(leaf: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a tensor that no op saves, and a list that receives its gradient."""
    gate_up, grads = leaf * 1.0, []
    gate_up.register_hook(grads.append)
    return gate_up, grads


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("linear", [False, True], ids=["glu", "glu_linear"])
def test_the_gradient_overwrites_what_is_consumed(place, linear, activation) -> None:
    """It is bitwise equal to the gradient that has memory of its own."""
    rows = random(3, 20, scale=3.0).to(*place)
    weight = random(7, 10).to(*place).requires_grad_()

    def op(gate_up, consume):
        if linear:
            return glu_linear(gate_up, weight, None, activation, consume=consume)
        return glu(gate_up, activation, consume=consume)

    results = []
    for consume in (False, True):
        weight.grad, leaf = None, rows.clone().requires_grad_()
        gate_up, grads = made_by_an_op(leaf)
        at = gate_up.data_ptr()
        out = op(gate_up, consume)
        out.backward(random(*out.shape, seed=1).to(out))
        assert (grads[0].data_ptr() == at) == consume
        assert not grads[0].requires_grad
        results.append((out, leaf.grad, weight.grad if linear else out))
    for ours, expected in zip(*results):
        assert torch.equal(ours, expected)


def test_a_retained_graph_consumes_nothing(float32_place) -> None:
    """Backward again gives the same; after the last backward autograd refuses another one."""
    leaf = random(3, 8).float().to(float32_place.device).requires_grad_()
    gate_up, grads = made_by_an_op(leaf)
    out = glu(gate_up, consume=True).sum()
    for retain in (True, True, False):
        out.backward(retain_graph=retain)
        assert torch.equal(grads[-1], grads[0])
    assert [x.data_ptr() == gate_up.data_ptr() for x in grads] == [False, False, True]
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_another_op_that_saved_what_is_consumed_raises(float32_place) -> None:
    leaf = random(3, 8).float().to(float32_place.device).requires_grad_()
    gate_up = leaf * 1.0
    reads_it_too = gate_up.sin().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (glu(gate_up, consume=True).sum() + reads_it_too).backward()
