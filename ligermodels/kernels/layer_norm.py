"""LayerNorm, alone or after a residual add, fused in forward and backward."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_residual, check_row_parameter, check_rows
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.rms_norm import grads_of_summands


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.ops = select("layer_norm", x, residual)
        y, s, mean, rstd = ctx.ops.layer_norm_forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_s: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("layer_norm")
        s, weight, mean, rstd = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        grad, grad_weight, grad_bias = grad_s, None, None
        if grad_y is not None:
            weight_dtype = weight.dtype if needs_grad[2] else None
            bias_dtype = ctx.bias_dtype if needs_grad[3] else None
            grad, grad_weight, grad_bias = ctx.ops.layer_norm_backward(
                grad_y, grad_s, s, weight, mean, rstd, weight_dtype, bias_dtype
            )
        return *grads_of_summands(ctx, grad), grad_weight, grad_bias, None


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
    return _LayerNorm.apply(x, None, weight, bias, eps)


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
    return _LayerNorm.apply(x, residual, weight, bias, eps)


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_rows(op, "x", x)
    if weight is not None:
        check_row_parameter(op, "weight", weight, "x", x)
    if bias is not None:
        check_row_parameter(op, "bias", bias, "x", x)
