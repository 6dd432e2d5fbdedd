"""Plain PyTorch: residual add and LayerNorm."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add, then normalise: s = x + residual; y = weight * (s - mean(s)) / std(s) + bias.

    std(s) = sqrt(var(s) + eps), and the variance divides by hidden. Ba et al. 2016,
    arXiv:1607.06450.

    Args: x, residual: (..., hidden); weight, bias: (hidden); None means one and zero.
    Returns: y (..., hidden) in x's dtype; s, which is x itself if residual is None; the mean (rows)
        and 1/std (rows).
    """
    s = x if residual is None else x + residual
    dtype = compute_dtype(s)
    s_float = cast(s, dtype)
    mean = s_float.mean(-1, keepdim=True)
    # Correct the rounding error of the mean. In a row of equal values, s - mean would be only that.
    mean = mean + (s_float - mean).mean(-1, keepdim=True)
    centred = s_float - mean
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * cast(weight, dtype)
    if bias is not None:
        y = y + cast(bias, dtype)
    return cast(y, x.dtype), s, mean.flatten(), rstd.flatten()


def layer_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of `layer_norm_forward` with respect to s, weight and bias.

    grad_s is the upstream gradient of the output s. It is added to the gradient of s.

    Args: weight_dtype, bias_dtype: None if that gradient is not needed.
    Returns: grad of s in s's dtype, grads of weight and bias in those dtypes, or None.
    """
    dtype = compute_dtype(s)
    hidden = s.shape[-1]
    mean, rstd = (t.view(*s.shape[:-1], 1) for t in (mean, rstd))
    normed = (cast(s, dtype) - mean) * rstd
    grad = cast(grad_y, dtype)
    grad_normed = grad if weight is None else grad * cast(weight, dtype)
    slope = (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = (grad_normed - grad_normed.mean(-1, keepdim=True) - normed * slope) * rstd
    if grad_s is not None:
        grad_x = grad_x + cast(grad_s, dtype)
    grad_weight = grad_bias = None
    if weight_dtype is not None:
        grad_weight = cast((grad * normed).sum_to_size(hidden), weight_dtype)
    if bias_dtype is not None:
        grad_bias = cast(grad.sum_to_size(hidden), bias_dtype)
    return cast(grad_x, s.dtype), grad_weight, grad_bias
