"""RMSNorm, alone or behind the residual add, fused each way."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, casting_mode):
        ctx.ops = select("rms_norm", x, residual)
        y, s, rstd = ctx.ops.rms_norm_forward(
            x, residual, weight, eps, offset, casting_mode, x.dtype
        )
        ctx.save_for_backward(s, weight, rstd)
        ctx.options = offset, casting_mode, None if residual is None else residual.dtype
        ctx.x_dtype = x.dtype
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, grad_y, grad_s=None):
        refuse_double_backward("rms_norm")
        s, weight, rstd = ctx.saved_tensors
        offset, casting_mode, residual_dtype = ctx.options
        if grad_y is None:
            grad_x, grad_weight = grad_s, None
        else:
            grad_x, grad_weight, _ = ctx.ops.rms_norm_backward(
                grad_y,
                grad_s,
                s,
                weight,
                rstd,
                offset,
                casting_mode,
                ctx.needs_input_grad[2],
                False,
            )
        grad_residual = None
        if residual_dtype is not None and grad_x is not None and ctx.needs_input_grad[1]:
            grad_residual = grad_x.to(residual_dtype)
        if grad_x is not None:
            grad_x = grad_x.to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grad_residual, grad_weight, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """y = (offset + weight) * x / sqrt(mean(x^2) + eps) over the last dimension.

    Args: x (..., hidden); weight (hidden); offset is 1 for Gemma, whose checkpoints store w - 1;
        casting_mode "llama" rounds the normalised x to its dtype before the product with the
        weight, "gemma" rounds once at the end. Statistics are float32.
    Returns: (..., hidden) in x's dtype. Source: arXiv:1910.07467.
    Raises: ValueError for a weight of another shape, x that is not floating point, an unknown
        casting_mode; under Triton for more than 65536 columns.
    """
    check_norm("rms_norm", x, weight, casting_mode)
    return _RMSNorm.apply(x, None, weight, eps, offset, casting_mode)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual) from one launch.

    Backward is one launch, and a small one for the weight's gradient where that is wanted.

    Args: x, residual (..., hidden), one shape; the rest as in `rms_norm`.
    Returns: the normalised sum in x's dtype, and the sum in the wider of the two dtypes.
    Raises: what `rms_norm` raises; ValueError where x and residual differ in shape.
    """
    check_norm("add_rms_norm", x, weight, casting_mode)
    check_residual("add_rms_norm", x, residual)
    return _RMSNorm.apply(x, residual, weight, eps, offset, casting_mode)


def check_norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    casting_mode: str,
    x_name: str = "x",
    weight_name: str = "weight",
) -> None:
    """Raise ValueError for a weight that does not fit x, or an unknown casting_mode."""
    check_floating(op, x_name, x)
    check_floating(op, weight_name, weight)
    if x.dim() == 0:
        raise ValueError(f"{op}: {x_name} is 0-dimensional; expected (..., hidden)")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: {weight_name} {tuple(weight.shape)} does not fit {x_name} {tuple(x.shape)}; "
            f"expected ({x.shape[-1]},)"
        )
    if casting_mode not in ("llama", "gemma"):
        raise ValueError(f"{op}: casting_mode={casting_mode!r}; expected 'llama' or 'gemma'")


def check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    """Raise ValueError for a residual that cannot be added to x."""
    check_floating(op, "residual", residual)
    if x.shape != residual.shape:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape"
        )
