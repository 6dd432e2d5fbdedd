"""Plain PyTorch: RMS norm of each query and key head, then the rotary embedding."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.dispatch import cast, compute_dtype
from ligermodels.kernels.reference.norms import norm_backward, norm_forward
from ligermodels.kernels.reference.rope import rotate


def qk_norm_rope_forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    options: NormOptions,
) -> Tensor:
    """Normalise each head over head_dim as `norm_forward` does, then rotate it.

    Args: q: (batch, seq, heads, head_dim); k: (batch, seq, kv heads, head_dim); both with any
        strides; q_weight, k_weight: (head_dim); cos, sin: (batch or 1, seq, rotated / 2).
    Returns: (batch, seq, heads + kv heads, head_dim), rounded to q's dtype once at the end.
    """
    dtype = compute_dtype(q)
    cos, sin = cast(cos, dtype), cast(sin, dtype)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        y, *_ = norm_forward(x, None, weight, None, options, False, dtype)
        return _rotate_first(y, cos, sin)

    return cast(torch.cat((one(q, q_weight), one(k, k_weight)), -2), q.dtype)


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = 2 * cos.shape[-1]
    if rotated == x.shape[-1]:
        return rotate(x, cos, sin)
    return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), -1)


def qk_norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_gate: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    options: NormOptions,
    needs_weight_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of `qk_norm_rope_forward` and pack those of q and k with grad_v.

    This recomputes 1/rms.

    Args: grad_gate: (batch, seq, heads, head_dim), which is packed with the heads of q, or None.
    Returns: (batch, seq, (heads + 2 kv heads) * head_dim) in q's dtype, or as many columns more as
        the gate has, and the gradients of q_weight and k_weight, or None.
    """
    dtype = compute_dtype(q)
    cos, sin = cast(cos, dtype), cast(sin, dtype)

    def one(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rstd = torch.rsqrt(cast(x, dtype).pow(2).mean(-1) + options.eps)
        grad = _rotate_first(cast(grad, dtype), cos, -sin)
        weight_dtype = weight.dtype if needs_weight_grads else None
        grad_x, grad_weight, *_ = norm_backward(
            grad, None, x, weight, None, rstd, options, weight_dtype, None, False
        )
        return grad_x, grad_weight

    grad_q, grad_q_weight = one(q, q_weight, grad_q)
    grad_k, grad_k_weight = one(k, k_weight, grad_k)
    if grad_gate is not None:
        grad_q = torch.stack((grad_q, cast(grad_gate, q.dtype)), -2).flatten(-3, -2)
    grad_qkv = torch.cat((grad_q, grad_k, cast(grad_v, q.dtype)), -2).flatten(-2)
    return grad_qkv, grad_q_weight, grad_k_weight
