"""AdamW computes what PyTorch's does, and has its state."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ligermodels import AdamW
from ligermodels.kernels import adamw


@pytest.mark.parametrize("of_group", [{}, {"maximize": True}, {"amsgrad": True}])
def test_steps(place, of_group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 number may round to a neighbour, because the order of operations differs."""
    monkeypatch.setattr(adamw, "LARGE", 1000)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(place.device, place.dtype)

    ours = [normal(3, 1001).requires_grad_(), normal(10).requires_grad_()]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    options = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
    one, other = (
        make([{"params": x, **of_group}], **options)
        for make, x in ((AdamW, ours), (partial(torch.optim.AdamW, fused=True), theirs))
    )
    for step in range(5):
        for a, b in zip(ours, theirs):
            a.grad = normal(*a.shape)
            b.grad = a.grad.clone()
        if step == 2:  # each goes on with the other's state
            states = one.state_dict(), other.state_dict()
            one.load_state_dict(states[1])
            other.load_state_dict(states[0])
        one.step()
        other.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(place.dtype).eps, atol=1e-6)
        assert one.state[a]["step"] == other.state[b]["step"] == 5
