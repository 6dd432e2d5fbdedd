"""Scales from the step before: how they move on, and how a run saves them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ligermodels.errors import CheckpointError
from ligermodels.float8.linear import Float8Linear, waiting
from ligermodels.kernels.float8_cast import formats
from ligermodels.kernels.float8_linear import GRAD

# How much larger a tensor may become within a step without saturating. For gradients the wide range
# of e5m2 has the space.
HEADROOM, GRAD_HEADROOM = 2, 16


def _move_on(*_: Any) -> None:
    linears = [*waiting]
    waiting.clear()
    for device in {linear.delayed.device for linear in linears}:
        _move([linear for linear in linears if linear.delayed.device == device])


def _move(linears: list[Float8Linear]) -> None:
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


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Return the delayed scales of a model, for `load_scales` when its run is resumed.

    Returns: by the name of each linear an int32 (3, 4): for x, the weight and the gradient the bits
        of the scale, of the largest value that fits and of the largest value since the last step,
        and in how many steps a value did not fit. It is empty without delayed scales.
    """
    return {name: linear.delayed.clone() for name, linear in _linears(model).items()}


def load_scales(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Continue with the scales that `scales` has returned.

    Raises:
        CheckpointError: they are of other linears, or have another shape or dtype.
    """
    linears = _linears(model)
    expected = {(n, linear.delayed.shape, torch.int32) for n, linear in linears.items()}
    if wrong := {(n, x.shape, x.dtype) for n, x in state.items()} ^ expected:
        names = sorted({name for name, *_ in wrong})
        raise CheckpointError(
            "float8 scales: the state and the model have scales of other linears, shapes or "
            f"dtypes: {', '.join(names[:10])} ({len(names)} in all); convert the model as in the "
            "run that saved them, with the same recipe and filter"
        )
    for name, linear in linears.items():
        linear.delayed.copy_(state[name])
        linear.known_scales = [None] * 3
        linear.know_scales((linear.delayed[:, 1] > 0).tolist())


def overflows(model: nn.Module) -> dict[str, list[int]]:
    """Return by linear in how many steps a value of x, the weight and the gradient saturated."""
    return {name: linear.delayed[:, 3].tolist() for name, linear in _linears(model).items()}


def _linears(model: nn.Module) -> dict[str, Float8Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and module.recipe.delayed
    }
