"""Scales from the step before: how a run saves them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ligermodels.errors import CheckpointError
from ligermodels.float8.linear import Float8Linear


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
