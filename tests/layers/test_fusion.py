"""Test which modules count as plain, and that the fused path and the called path agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ligermodels.layers import RMSNorm
from ligermodels.layers.fusion import (
    AppliedNorm,
    PendingNorm,
    is_plain,
    norm_then_linear,
    pre_norm,
    pre_norm_names,
)


def test_plain() -> None:
    assert is_plain(nn.Linear(2, 3), nn.Linear)
    assert is_plain(nn.Linear(2, 3, device="meta"), nn.Linear)
    assert is_plain(RMSNorm(3), RMSNorm)
    assert not is_plain(nn.RMSNorm(3), RMSNorm)
    assert not is_plain(nn.Identity(), nn.Linear)


def test_subclasses_are_not() -> None:
    class Mine(nn.Linear):
        pass

    assert not is_plain(Mine(2, 3), nn.Linear)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooked_are_not_until_the_hook_is_gone(register: str) -> None:
    linear = nn.Linear(2, 3)
    handle = getattr(linear, register)(lambda *args: None)
    assert not is_plain(linear, nn.Linear)
    handle.remove()
    assert is_plain(linear, nn.Linear)


def test_parametrised_are_not() -> None:
    linear = nn.Linear(2, 3)
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    assert not is_plain(linear, nn.Linear)


def test_tensor_subclasses_are_not() -> None:
    class Quantised(torch.Tensor):
        pass

    linear = nn.Linear(2, 3)
    linear.weight = nn.Parameter(torch.randn(3, 2).as_subclass(Quantised))
    assert not is_plain(linear, nn.Linear)


def test_an_instance_whose_forward_was_replaced_is_not() -> None:
    """accelerate and several quantisers replace `forward` of an instance."""
    linear = nn.Linear(2, 3)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_plain(linear, nn.Linear)


@pytest.mark.parametrize("residual", [None, torch.ones(4, 6)])
def test_called_equals_fused(residual: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    norm, linear, x = RMSNorm(6), nn.Linear(6, 5), torch.randn(4, 6)
    pending = pre_norm(norm, x, residual)
    assert isinstance(pending, PendingNorm)
    fused, total = norm_then_linear(pending, linear)
    handle = linear.register_forward_hook(lambda *args: None)
    called, called_total = norm_then_linear(pending, linear)
    handle.remove()
    torch.testing.assert_close(fused, called)
    assert torch.equal(total, called_total)
    y, total = pending.apply()
    torch.testing.assert_close(linear(y), fused)
    assert torch.equal(total, called_total)
    alone, nothing = norm_then_linear(y, linear)
    assert torch.equal(alone, linear(y)) and nothing is None


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


def test_where_norms_stand_by_their_names() -> None:
    def block(*names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Identity() for name in names})

    plain = block("input_layernorm", "post_attention_layernorm")
    assert pre_norm_names(plain) == ("input_layernorm", "post_attention_layernorm")
    for other in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        names = pre_norm_names(block("post_attention_layernorm", other))
        assert names == ("input_layernorm", "pre_feedforward_layernorm")


def test_no_module_travels_in_a_pending_norm() -> None:
    """Tools that move arguments to a device would also move the module's weights."""
    for part in pre_norm(RMSNorm(6), torch.ones(2, 6), torch.ones(2, 6)):
        assert not isinstance(part, nn.Module)


@pytest.mark.parametrize(
    "register",
    [
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
def test_no_module_is_while_a_hook_of_all_modules_is_registered(register: str) -> None:
    linear = nn.Linear(2, 3)
    handle = getattr(torch.nn.modules.module, register)(lambda *args: None)
    try:
        assert not is_plain(linear, nn.Linear)
    finally:
        handle.remove()
    assert is_plain(linear, nn.Linear)
