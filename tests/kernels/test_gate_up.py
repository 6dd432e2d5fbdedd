"""Gate and up of experts and their activations, as one op, beside the reference in float64."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.dispatch import select
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

    def run(ops, dtype):
        args = x.to(dtype), (order, place), weight.to(dtype), starts
        return ops.expert_gate_up(*args, (bias, owner), activation)

    gate_up, made = run(select("expert_mlp", x), x.dtype)
    exact, _ = run(reference, torch.float64)
    torch.testing.assert_close(gate_up, exact.to(x.dtype))
    rounded = reference.expert_glu_forward(gate_up.double(), bias, owner, activation)
    torch.testing.assert_close(made, rounded.to(x.dtype))
