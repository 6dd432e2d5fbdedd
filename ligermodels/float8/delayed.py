"""Scales from the step before: how they move on."""

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ligermodels.kernels.float8_cast import formats
from ligermodels.kernels.float8_linear import GRAD

# How much larger a tensor may become within a step without saturating. For gradients the wide range
# of e5m2 has the space.
HEADROOM, GRAD_HEADROOM = 2, 16
# `Float8Linear`s whose scales move on after the next step of an optimizer.
waiting: WeakSet[Any] = WeakSet()


def _move_on(*_: Any) -> None:
    linears = [*waiting]
    waiting.clear()
    for device in {linear.delayed.device for linear in linears}:
        _move([linear for linear in linears if linear.delayed.device == device])


def _move(linears: list[Any]) -> None:
    """Make the largest values of this step the limits of the next one."""
    states = torch.stack([linear.delayed for linear in linears])
    scales, limits, seen, _ = states.view(torch.float32).unbind(2)
    states[:, :, 3] += (limits > 0) & ~(seen <= limits)
    # A step without a gradient, or with a NaN, says nothing about the next one.
    fits = seen.isfinite() & (seen > 0)
    most = seen * HEADROOM
    most[:, GRAD] *= GRAD_HEADROOM / HEADROOM
    raised = torch.where(fits, most, limits)
    # Behind a gradient that saturated, backward computed smaller ones. So raise all of them.
    grown = torch.where(fits & (limits > 0), seen / limits, 0)[:, GRAD].max()
    known = torch.where(grown > 1, limits[:, GRAD] * grown, 0)
    raised[:, GRAD] = torch.maximum(raised[:, GRAD], known)
    limits.copy_(raised)
    e4m3, e5m2 = (torch.finfo(dtype).max for dtype in formats())
    scales.copy_(limits / e4m3)
    scales[:, GRAD] *= e4m3 / e5m2
    seen.zero_()
    torch._foreach_copy_([linear.delayed for linear in linears], [*states])
    # Only the first steps wait for the device.
    if any(False in linear.known_scales for linear in linears):
        for linear, known in zip(linears, (limits > 0).tolist()):
            linear.know_scales(known)


@cache
def follow_optimizers() -> None:
    """Let scales move on after each step of an optimizer of `torch.optim`."""
    register_optimizer_step_post_hook(_move_on)
