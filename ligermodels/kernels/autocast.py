"""torch.autocast for the fused ops: operands are cast before the op, nothing inside it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that matmuls on x's device take under the autocast now active, or None."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return None


def cast_operands(x: Tensor, *operands: Tensor | None) -> tuple[Any, ...]:
    """The operands of a matmul with x as autocast would cast them, differentiably; None stays."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return operands
    return tuple(None if operand is None else operand.to(dtype) for operand in operands)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves x's device alone."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
