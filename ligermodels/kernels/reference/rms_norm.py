"""Plain PyTorch: residual add and RMSNorm."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.dispatch import cast, compute_dtype
from ligermodels.kernels.reference.float8_cast import recorded, scaled


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    options: NormOptions,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, then normalise: s = x + residual; y = (offset + weight) * s / sqrt(mean(s^2) + eps).

    Zhang and Sennrich 2019, arXiv:1910.07467. casting_mode "llama" rounds the normalised s to its
    dtype before the product with the weight, like HF's Llama. "gemma" computes in float32 until the
    end.

    Args: x, residual: (..., hidden); weight: (hidden); amax: float32 (1, 1) that is raised to the
        largest absolute value of y; limit: if out_dtype is in float8, the absolute value (1, 1)
        that fits into it.
    Returns: y (..., hidden) in out_dtype; s, which is x itself if residual is None; 1/rms (rows).
    """
    s = x if residual is None else x + residual
    dtype = compute_dtype(s)
    s_float = s if s.dtype == dtype else cast(s, dtype)
    rstd = (s_float * s_float).mean(-1, keepdim=True).add_(options.eps).rsqrt_()
    normed = s_float * rstd
    if options.casting_mode == "llama" and s.dtype != dtype:
        normed = cast(cast(normed, s.dtype), dtype)
    factor = weight if weight.dtype == dtype else cast(weight, dtype)
    # On a CPU each operator counts in a step of decoding, so this one is left out if it can be.
    y = normed * (factor + options.offset if options.offset else factor)
    if limit is not None:
        y = scaled(recorded(cast(y, s.dtype), amax), limit, out_dtype)[0]
        return y, s, rstd.flatten()
    y = y if y.dtype == out_dtype else cast(y, out_dtype)
    return y if amax is None else recorded(y, amax), s, rstd.view(-1)


def rms_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    options: NormOptions,
    needs_weight_grad: bool,
    recompute_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of `rms_norm_forward` with respect to s and weight.

    grad_s is the upstream gradient of the output s. It is added to the gradient of s.

    Returns: grad of s in s's dtype, grad of weight or None, y recomputed in grad_y's dtype or None.
        y may take the memory of grad_y.
    """
    dtype = compute_dtype(s)
    normed = cast(s, dtype) * rstd.view(*s.shape[:-1], 1)
    scaled = cast(weight, dtype) + options.offset
    grad = cast(grad_y, dtype)
    grad_normed = grad * scaled
    grad_x = grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = grad_x * rstd.view(*s.shape[:-1], 1)
    if grad_s is not None:
        grad_x = grad_x + cast(grad_s, dtype)
    llama = options.casting_mode == "llama"
    rounded = cast(cast(normed, s.dtype), dtype) if llama else normed
    grad_weight = y = None
    if needs_weight_grad:
        grad_weight = cast((grad * rounded).sum_to_size(weight.shape), weight.dtype)
    if recompute_y:
        y = cast(rounded * scaled, grad_y.dtype)
    return cast(grad_x, s.dtype), grad_weight, y
