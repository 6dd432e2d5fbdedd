"""torch.autocast for the fused ops: operands are cast before the op, nothing inside it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_is_on(x: Tensor) -> bool:
    """Whether autocast is active for x's device."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that matmuls of x take under the autocast now active; None for float64, too."""
    if autocast_is_on(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None


def cast_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear of x as autocast would cast them, differentiably."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return weight, bias
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves x's device alone."""
    if autocast_is_on(x):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
