"""When a module counts as plain, and that the fused and the called path agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ligermodels.layers import RMSNorm
from ligermodels.layers.fusion import is_plain, norm_then_linear, normalized


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
    """As accelerate and several quantisers do it."""
    linear = nn.Linear(2, 3)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_plain(linear, nn.Linear)


@pytest.mark.parametrize("residual", [None, torch.ones(4, 6)])
def test_called_equals_fused(residual: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    norm, linear, x = RMSNorm(6), nn.Linear(6, 5), torch.randn(4, 6)
    fused, total = norm_then_linear(x, residual, norm, linear)
    handle = linear.register_forward_hook(lambda *args: None)
    called, called_total = norm_then_linear(x, residual, norm, linear)
    handle.remove()
    torch.testing.assert_close(fused, called)
    assert torch.equal(total, called_total)
    y, total = normalized(x, residual, norm)
    torch.testing.assert_close(linear(y), fused)
    same, again = normalized(x, residual, None)
    assert torch.equal(same, total)
    assert same is again
