"""LayerNorm, alone or behind the residual add, fused each way."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.rms_norm import check_residual


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        ctx.ops = select("layer_norm", x, residual)
        y, s, mean, rstd = ctx.ops.layer_norm_forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.x_dtype = x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx, grad_y, grad_s=None):
        refuse_double_backward("layer_norm")
        s, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if grad_y is None:
            grad, grad_weight, grad_bias = grad_s, None, None
        else:
            weight_dtype = weight.dtype if needs[2] else None
            bias_dtype = ctx.bias_dtype if needs[3] else None
            grad, grad_weight, grad_bias = ctx.ops.layer_norm_backward(
                grad_y, grad_s, s, weight, mean, rstd, weight_dtype, bias_dtype
            )
        grad_x = grad.to(ctx.x_dtype) if needs[0] and grad is not None else None
        grad_residual = grad.to(ctx.residual_dtype) if needs[1] and grad is not None else None
        return grad_x, grad_residual, grad_weight, grad_bias, None


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the last dimension.

    Args: x (..., hidden); weight, bias (hidden), one and zero where None. Statistics are float32,
        the variance that of the row itself (divided by hidden), the result is rounded once.
    Returns: (..., hidden) in x's dtype.
    Raises: ValueError for a weight or bias of another shape, or x that is not floating point;
        under Triton for more than 65536 columns.
    Source: arXiv:1607.06450.
    """
    _check(x, weight, bias)
    return _LayerNorm.apply(x, None, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual) from one launch.

    Backward is one launch, and a small one for the parameters' gradients where they are wanted.

    Args: x, residual (..., hidden), one shape; the rest as in `layer_norm`.
    Returns: the normalised sum in x's dtype, and the sum in the wider of the two dtypes.
    Raises: what `layer_norm` raises; ValueError where x and residual differ in shape.
    """
    _check(x, weight, bias)
    check_residual("add_layer_norm", x, residual)
    return _LayerNorm.apply(x, residual, weight, bias, eps)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_floating("layer_norm", "x", x)
    if x.dim() == 0:
        raise ValueError("layer_norm: x is 0-dimensional; expected (..., hidden)")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        check_floating("layer_norm", name, parameter)
        if parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"layer_norm: {name} {tuple(parameter.shape)} does not fit x {tuple(x.shape)}; "
                f"expected ({x.shape[-1]},)"
            )
