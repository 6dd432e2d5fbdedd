"""Plain PyTorch: rotary position embedding of packed rows."""

import torch
from torch import Tensor

from ligermodels.kernels.dtypes import cast, compute_dtype


def rope_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, in_place: bool
) -> Tensor:
    """Rotate q and k within packed rows. v does not change.

    Su et al. 2021, arXiv:2104.09864, in the half-split layout of HF checkpoints: the two halves
    (a, b) of a head become (a cos - b sin, b cos + a sin).

    Args: qkv: (batch, seq, (heads + 2 kv heads) * head_dim); cos, sin: (batch or 1, seq,
        head_dim / 2); in_place: whether qkv, which must be contiguous, may be overwritten.
    Returns: the rotated rows in qkv's shape: qkv itself or a new tensor.
    """
    dtype = compute_dtype(qkv)
    cos, sin = cast(cos, dtype), cast(sin, dtype)
    rotated = (num_heads + num_kv_heads) * 2 * cos.shape[-1]
    heads = qkv[..., :rotated].unflatten(-1, (-1, 2 * cos.shape[-1]))
    turned = cast(rotate_halves(cast(heads, dtype), cos, sin), qkv.dtype).flatten(-2)
    if not in_place or torch.compiler.is_compiling():
        # torch.compile turns the write into a copy anyway, and torch 2.11 loses writes to views.
        return torch.cat((turned, qkv[..., rotated:]), -1)
    qkv[..., :rotated] = turned
    return qkv


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Compute the gradient of `rope_forward`: rotate grad_q and grad_k back, pack all three.

    Args: grad_q: (batch, seq, heads, head_dim); grad_k, grad_v: (batch, seq, kv heads, head_dim);
        all three with any strides; cos, sin: as in `rope_forward`.
    Returns: (batch, seq, (heads + 2 kv heads) * head_dim), a new tensor.
    """
    dtype = compute_dtype(grad_q)
    cos, sin = cast(cos, dtype), cast(sin, dtype)
    turned = (cast(rotate_halves(cast(x, dtype), cos, -sin), x.dtype) for x in (grad_q, grad_k))
    return torch.cat((*turned, grad_v), -2).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return (a cos - b sin, b cos + a sin) for the halves (a, b) of each head in x."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
