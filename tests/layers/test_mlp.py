"""Compare the gated MLP with its formula, with and without a fused norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers import GatedMLP, RMSNorm, pre_norm
from tests.models.pairs import relative
from tests.pairwise import pairwise


def formula(mlp: GatedMLP, x: Tensor) -> Tensor:
    gate, up = mlp.gate_up_proj(x).chunk(2, -1)
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }[mlp.activation]
    return mlp.down_proj(act(gate) * up)


@pairwise(
    activation=["silu", "gelu_tanh", "gelu"],
    residual=[False, True],
    normed=[False, True],
    bias=[False, True],
)
def test_equals_the_formula(bias: bool, normed: bool, residual: bool, activation: str) -> None:
    torch.manual_seed(0)
    mlp, norm = GatedMLP(20, 27, bias=bias, activation=activation), RMSNorm(20)
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    x = torch.randn(2, 5, 20, requires_grad=True)
    added = torch.randn(2, 5, 20, requires_grad=True) if residual and normed else None
    leaves = [x, *mlp.parameters()] + ([] if added is None else [added])
    leaves += [norm.weight] if normed else []
    upstreams = torch.randn(2, 2, 5, 20)
    if normed:
        out, total = mlp(pre_norm(norm, x, added))
        grads = torch.autograd.grad((out, total), leaves, (*upstreams,))
    else:
        out = mlp(x)
        grads = torch.autograd.grad(out, leaves, upstreams[0])

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    mlp64 = GatedMLP(20, 27, bias=bias, activation=activation).double()
    parameters = dict(zip([name for name, _ in mlp.named_parameters()], exact[1:]))
    total64 = exact[0] if added is None else exact[0] + exact[len(parameters) + 1]
    y = F.rms_norm(total64, (20,), exact[-1], norm.eps) if normed else total64

    class Formula(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp64

        def forward(self, y: Tensor) -> Tensor:
            return formula(self.mlp, y)

    expected = torch.func.functional_call(
        Formula(), {f"mlp.{name}": p for name, p in parameters.items()}, (y,)
    )
    assert relative(out, expected) <= 1e-6
    if normed:
        assert relative(total, total64) <= 1e-7
        outputs, ups = (expected, total64), (*upstreams.double(),)
    else:
        outputs, ups = (expected,), (upstreams[0].double(),)
    wanted = torch.autograd.grad(outputs, exact, ups)
    for grad, want in zip(grads, wanted):
        assert relative(grad, want) <= 1e-6


def test_numbers_that_no_mlp_has_are_refused() -> None:
    for wrong in ({"hidden_size": 0}, {"intermediate_size": 2.5}, {"activation": "relu"}):
        with pytest.raises(ValueError, match=f"GatedMLP: {next(iter(wrong))}=.*; expected "):
            GatedMLP(**{"hidden_size": 4, "intermediate_size": 6, **wrong})
