"""Test which modules count as plain, and that the fused path and the called path agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ligermodels.layers import LayerNorm, RMSNorm
from ligermodels.layers.fusion import (
    AppliedNorm,
    is_plain,
    norm_then_linear,
    pre_norm,
    pre_norm_names,
)


class Mine(nn.Linear):
    pass


class Quantised(torch.Tensor):
    pass


def changed(change: Callable[[nn.Linear], object]) -> nn.Linear:
    linear = nn.Linear(2, 3)
    change(linear)
    return linear


def test_plain() -> None:
    assert is_plain(nn.Linear(2, 3), nn.Linear) and is_plain(RMSNorm(3), RMSNorm)
    assert is_plain(nn.Linear(2, 3, device="meta"), nn.Linear)
    quantised = nn.Parameter(torch.randn(3, 2).as_subclass(Quantised))
    for other in (
        nn.Identity(),
        Mine(2, 3),
        changed(lambda x: parametrize.register_parametrization(x, "weight", nn.Identity())),
        changed(lambda x: setattr(x, "weight", quantised)),
        changed(lambda x: setattr(x, "forward", abs)),  # as accelerate and quantisers do
    ):
        assert not is_plain(other, nn.Linear)
    assert not is_plain(nn.RMSNorm(3), RMSNorm)


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("of_all", [False, True])
def test_no_module_is_plain_while_it_has_a_hook(hook: str, of_all: bool) -> None:
    linear = nn.Linear(2, 3)
    owner, name = (nn.modules.module, "register_module_") if of_all else (linear, "register_")
    handle = getattr(owner, name + hook)(lambda *args: None)
    try:
        assert not is_plain(linear, nn.Linear)
    finally:
        handle.remove()
    assert is_plain(linear, nn.Linear)


def test_a_norm_that_is_not_plain_is_called() -> None:
    torch.manual_seed(0)
    norm, linear, x, residual = RMSNorm(6), nn.Linear(6, 5), *torch.randn(2, 4, 6)
    fused, total = norm_then_linear(pre_norm(norm, x, residual), linear)
    calls = []
    norm.register_forward_hook(lambda *args: calls.append(1))
    applied = pre_norm(norm, x, residual)
    assert isinstance(applied, AppliedNorm) and len(calls) == 1
    called, called_total = norm_then_linear(applied, linear)
    torch.testing.assert_close(fused, called)
    assert torch.equal(total, called_total)
    # A norm of another library takes no residual.
    foreign = nn.RMSNorm(6, eps=norm.eps)
    called, called_total = norm_then_linear(pre_norm(foreign, x, residual), linear)
    torch.testing.assert_close(called, fused)
    assert torch.equal(called_total, total)
    assert norm_then_linear(pre_norm(foreign, x), linear)[1] is x


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm, nn.RMSNorm])
def test_under_autocast_a_norm_does_not_depend_on_how_its_sum_is_split(
    kind: Callable[[int], nn.Module],
) -> None:
    """Autograd adds the gradients of several products in the dtype of the norm's output."""
    torch.manual_seed(0)
    norm, x, residual = kind(6), torch.randn(4, 6).bfloat16(), torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, total = pre_norm(norm, x, residual).apply()
        same_y, same_total = pre_norm(norm, x + residual).apply()
    assert y.dtype == same_y.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(y, same_y) and torch.equal(total, same_total)


def test_where_norms_stand_by_their_names() -> None:
    def block(*names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Identity() for name in names})

    plain = block("input_layernorm", "post_attention_layernorm")
    assert pre_norm_names(plain) == ("input_layernorm", "post_attention_layernorm")
    for other in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        names = pre_norm_names(block("post_attention_layernorm", other))
        assert names == ("input_layernorm", "pre_feedforward_layernorm")
