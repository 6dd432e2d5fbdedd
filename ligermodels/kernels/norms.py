"""RMSNorm and LayerNorm, alone or after a residual add, fused in forward and backward."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import (
    NormOptions,
    check_residual,
    check_rms_norm,
    check_row_parameter,
    check_rows,
)
from ligermodels.kernels.dispatch import apply, refuse_double_backward, select


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: NormOptions,
        centre: bool,
        with_sum: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.ops, ctx.options = select("norms", x, residual), options
        y, s, mean, rstd = ctx.ops.norm_forward(x, residual, weight, bias, options, centre, x.dtype)
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return (y, s) if with_sum else y

    @staticmethod
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_s: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        s, weight, mean, rstd = ctx.saved_tensors
        refuse_double_backward("rms_norm" if mean is None else "layer_norm")
        needs_grad = ctx.needs_input_grad
        grad, grad_weight, grad_bias = grad_s, None, None
        if grad_y is not None:
            weight_dtype = weight.dtype if needs_grad[2] else None
            bias_dtype = ctx.bias_dtype if needs_grad[3] else None
            grad, grad_weight, grad_bias, _ = ctx.ops.norm_backward(
                *(grad_y, grad_s, s, weight, mean, rstd, ctx.options),
                *(weight_dtype, bias_dtype, False),
            )
        return *grads_of_summands(ctx, grad), grad_weight, grad_bias, None, None, None


def grads_of_summands(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and residual, given the gradient of their sum.

    x and residual are the first two inputs of the Function. Each gradient has the dtype of its
    input (from ctx.dtypes), or is None if it is not needed.
    """
    if grad is None:
        return None, None
    x_dtype, residual_dtype = ctx.dtypes
    needs_grad = ctx.needs_input_grad
    grad_x = grad.to(x_dtype) if needs_grad[0] else None
    return grad_x, grad.to(residual_dtype) if needs_grad[1] else None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> Tensor:
    """Return (offset + weight) * x / sqrt(mean(x^2) + eps), over the last dimension.

    Args: x: (..., hidden); weight: (hidden); offset: 1 for Gemma, whose checkpoints store
        weight - 1; casting_mode: "llama" rounds the normalised x to its dtype before the product
        with the weight, "gemma" rounds once at the end. mean(x^2) is computed in float32.
    Returns: (..., hidden) in x's dtype.
    Raises: ValueError if weight's shape does not fit, a tensor is not floating point, casting_mode
        is unknown, or the Triton kernel gets more than 65536 columns.
    Source: arXiv:1910.07467.
    """
    check_rms_norm("rms_norm", x, weight, casting_mode)
    options = NormOptions(eps, offset, casting_mode)
    return apply(_Norm, x, None, weight, None, options, False, False)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual) from one launch.

    Backward is one launch, and a second small one if the weight needs a gradient.

    Args: x, residual: (..., hidden), of the same shape; a residual of None means zero; for the
        other arguments see `rms_norm`.
    Returns: the normalised sum in x's dtype, and the sum in the promoted dtype of both. Without a
        residual the sum is x; use it instead of x, so that the launch of backward adds its gradient
        and autograd makes no tensor for that.
    Raises: ValueError as `rms_norm`, or if x and residual differ in shape.
    """
    check_rms_norm("add_rms_norm", x, weight, casting_mode)
    if residual is not None:
        check_residual("add_rms_norm", x, residual)
    options = NormOptions(eps, offset, casting_mode)
    return apply(_Norm, x, residual, weight, None, options, False, True)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, over the last dimension.

    Args: x: (..., hidden); weight, bias: (hidden); None means one and zero. Mean and variance are
        computed in float32, and the variance divides by hidden.
    Returns: (..., hidden) in x's dtype, rounded once.
    Raises: ValueError if the shape of weight or bias does not fit, a tensor is not floating point,
        or the Triton kernel gets more than 65536 columns.
    Source: arXiv:1607.06450.
    """
    _check("layer_norm", x, weight, bias)
    return apply(_Norm, x, None, weight, bias, NormOptions(eps, 0.0, "gemma"), True, False)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual) from one launch.

    Backward is one launch, and a second small one if weight or bias needs a gradient.

    Args: x, residual: (..., hidden), of the same shape; for the other arguments see `layer_norm`.
    Returns: the normalised sum in x's dtype, and the sum in the promoted dtype of both.
    Raises: ValueError as `layer_norm`, or if x and residual differ in shape.
    """
    _check("add_layer_norm", x, weight, bias)
    check_residual("add_layer_norm", x, residual)
    return apply(_Norm, x, residual, weight, bias, NormOptions(eps, 0.0, "gemma"), True, True)


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_rows(op, "x", x)
    if weight is not None:
        check_row_parameter(op, "weight", weight, "x", x)
    if bias is not None:
        check_row_parameter(op, "bias", bias, "x", x)
