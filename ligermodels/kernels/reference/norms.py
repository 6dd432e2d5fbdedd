"""Plain PyTorch: residual add, then RMSNorm or LayerNorm."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.dispatch import cast, compute_dtype
from ligermodels.kernels.reference.float8_cast import recorded, scaled


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
    centre: bool,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Add, then normalise: s = x + residual; y = (offset + weight) * s / sqrt(mean(s^2) + eps).

    Zhang and Sennrich 2019, arXiv:1910.07467. casting_mode "llama" rounds the normalised s to its
    dtype before the product with the weight, like HF's Llama. "gemma" computes in float32 until the
    end. With `centre`, the mean of s is subtracted first; Ba et al. 2016, arXiv:1607.06450.

    Args: x, residual: (..., hidden); weight, bias: (hidden); None means one and zero; amax: float32
        (1, 1) that is raised to the largest absolute value of y; limit: if out_dtype is in float8,
        the absolute value (1, 1) that fits into it.
    Returns: y (..., hidden) in out_dtype; s, which is x itself if residual is None; the mean (rows)
        or None; 1/rms or 1/std (rows).
    """
    s = x if residual is None else x + residual
    dtype = compute_dtype(s)
    centred = s if s.dtype == dtype else cast(s, dtype)
    mean = None
    if centre:
        mean = centred.mean(-1, keepdim=True)
        # Correct the rounding error of the mean. In a row of equal values, s - mean would be only
        # that.
        mean = mean + (centred - mean).mean(-1, keepdim=True)
        centred = centred - mean
    rstd = (centred * centred).mean(-1, keepdim=True).add_(options.eps).rsqrt_()
    y = centred * rstd
    if options.casting_mode == "llama" and s.dtype != dtype:
        y = cast(cast(y, s.dtype), dtype)
    if weight is not None:
        factor = weight if weight.dtype == dtype else cast(weight, dtype)
        # On a CPU each operator counts in a step of decoding, so this one is left out if it can be.
        y = y * (factor + options.offset if options.offset else factor)
    if bias is not None:
        y = y + cast(bias, dtype)
    if limit is not None:
        y = scaled(recorded(cast(y, s.dtype), amax), limit, out_dtype)[0]
    else:
        y = y if y.dtype == out_dtype else cast(y, out_dtype)
        y = y if amax is None else recorded(y, amax)
    return y, s, None if mean is None else mean.flatten(), rstd.view(-1)


def norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    options: NormOptions,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    recompute_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of `norm_forward` with respect to s, weight and bias.

    grad_s is the upstream gradient of the output s. It is added to the gradient of s.

    Args: weight_dtype, bias_dtype: None if that gradient is not needed; recompute_y: only with a
        weight and without a mean.
    Returns: grad of s in s's dtype, grads of weight and bias in those dtypes, or None, and y
        recomputed in grad_y's dtype, or None. y may take the memory of grad_y.
    """
    dtype, shape = compute_dtype(s), (*s.shape[:-1], 1)
    normed, rstd = cast(s, dtype), rstd.view(shape)
    if mean is not None:
        normed = normed - mean.view(shape)
    normed = normed * rstd
    factor = None if weight is None else cast(weight, dtype) + options.offset
    grad = cast(grad_y, dtype)
    grad_normed = grad if factor is None else grad * factor
    slope = (grad_normed * normed).mean(-1, keepdim=True)
    if mean is not None:
        grad_normed = grad_normed - grad_normed.mean(-1, keepdim=True)
    grad_x = (grad_normed - normed * slope) * rstd
    if grad_s is not None:
        grad_x = grad_x + cast(grad_s, dtype)
    llama = options.casting_mode == "llama"
    rounded = cast(cast(normed, s.dtype), dtype) if llama else normed
    grad_weight = grad_bias = y = None
    if weight_dtype is not None:
        grad_weight = cast((grad * rounded).sum_to_size(s.shape[-1]), weight_dtype)
    if bias_dtype is not None:
        grad_bias = cast(grad.sum_to_size(s.shape[-1]), bias_dtype)
    if recompute_y:
        assert factor is not None
        y = cast(rounded * factor, grad_y.dtype)
    return cast(grad_x, s.dtype), grad_weight, grad_bias, y
