"""Compare the gated MLP with its formula, with and without a fused norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers import GatedMLP, RMSNorm, pre_norm
from tests.models.pairs import relative
from tests.pairwise import pairwise

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def formula(mlp: GatedMLP, norm: RMSNorm | None, total: Tensor) -> tuple[Tensor, Tensor]:
    y = total if norm is None else F.rms_norm(total, (20,), norm.weight, norm.eps)
    gate, up = mlp.gate_up_proj(y).chunk(2, -1)
    return mlp.down_proj(ACTIVATIONS[mlp.activation](gate) * up), total


@pairwise(activation=ACTIVATIONS, residual=[False, True], normed=[False, True], bias=[False, True])
def test_equals_the_formula(bias: bool, normed: bool, residual: bool, activation: str) -> None:
    torch.manual_seed(0)
    mlp, norm = GatedMLP(20, 27, bias=bias, activation=activation), RMSNorm(20)
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    x, added, *upstreams = torch.randn(4, 2, 5, 20)
    leaves = [x, added][: 1 + (residual and normed)]
    results = []
    for wide in (False, True):
        given = [leaf.to(torch.float64 if wide else leaf.dtype).requires_grad_() for leaf in leaves]
        parameters = [*mlp.parameters(), *(norm.parameters() if normed else ())]
        if wide:
            outputs = formula(mlp.double(), norm.double() if normed else None, sum(given))
        elif normed:
            outputs = mlp(pre_norm(norm, *given))
        else:
            outputs = mlp(*given), given[0]
        ups = [upstream.to(outputs[0]) for upstream in upstreams]
        grads = torch.autograd.grad(outputs, given + parameters, ups)
        results.append([x.detach() for x in (*outputs, *grads)])
    for ours, exact in zip(*results):
        assert relative(ours, exact) <= 1e-6


def test_numbers_that_no_mlp_has_are_refused() -> None:
    for wrong in ({"hidden_size": 0}, {"intermediate_size": 2.5}, {"activation": "relu"}):
        with pytest.raises(ValueError, match=f"GatedMLP: {next(iter(wrong))}=.*; expected "):
            GatedMLP(**{"hidden_size": 4, "intermediate_size": 6, **wrong})
