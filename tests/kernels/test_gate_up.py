"""Gate and up of experts and their activations, as one op, beside the reference in float64."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.expert_mlp import expert_mlp
from ligermodels.kernels.reference import expert_mlp as reference
from ligermodels.kernels.reference.routing import sort_by_expert


@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "activation"),
    [
        (70, 64, 40, "silu"),
        (70, 128, 144, "gelu"),  # two blocks of columns
        (9, 32, 16, ClampedSwiGLU(limit=1.0)),
        (3, 33, 17, ClampedSwiGLU()),
    ],
)
def test_rows_are_gathered_and_activated(every_place, tokens, hidden, inner, activation) -> None:
    """The first expert has no row, and the last one has most."""
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(5, 2 * inner, hidden + 1, generator=generator) - 0.5
    x = torch.randn(tokens, hidden, generator=generator)
    experts = 4 - torch.rand(tokens, 4, generator=generator).sort()[1][:, :2].int().clamp(max=3)
    experts[:, 1] = 4
    order, place, starts = (t.to(every_place.device) for t in sort_by_expert(experts, 5))
    owner = experts.flatten()[order.cpu()].to(every_place.device)
    x, random = (t.to(*every_place) for t in (x, random))
    weight, bias = random[..., 1:].contiguous().mT, random[..., 0].contiguous()
    bias = bias if isinstance(activation, ClampedSwiGLU) else None

    def run(ops, dtype, stack):
        args = x.to(dtype), (order, place), stack.to(dtype), starts
        return ops.expert_gate_up(*args, (bias, owner), activation)

    exact, _ = run(reference, torch.float64, weight)
    for stack in (weight, weight.contiguous()):
        gate_up, made = run(select("expert_mlp", x), x.dtype, stack)
        torch.testing.assert_close(gate_up, exact.to(x.dtype))
        rounded = reference.expert_glu_forward(gate_up.double(), bias, owner, activation)
        torch.testing.assert_close(made, rounded.to(x.dtype))


def test_backward_keeps_no_activations_that_it_makes_again(monkeypatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    first, last = reference.expert_gate_up, reference.expert_glu_backward

    def forward(*args: Any) -> Any:
        found = first(*args)
        made.append(weakref.ref(found[1]))
        return found

    def backward(*args: Any) -> Any:
        assert len(made) == 2 and made[1]() is None
        return last(*args)

    monkeypatch.setattr(reference, "expert_gate_up", forward)
    monkeypatch.setattr(reference, "expert_glu_backward", backward)
    x, weights = torch.randn(3, 4, requires_grad=True), torch.rand(3, 1)
    stacks = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    experts = torch.tensor([[0], [1], [0]])
    expert_mlp(x, *stacks, weights, experts, keep_gate_up=False).sum().backward()
