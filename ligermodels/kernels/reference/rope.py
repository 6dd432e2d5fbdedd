"""Rotary position embedding of packed rows, in plain PyTorch."""

import torch
from torch import Tensor

from ligermodels.kernels.dtypes import cast, compute_dtype


def rope_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, in_place: bool
) -> Tensor:
    """The rotary embedding of q and k within packed rows; v is left as it is.

    Su et al. 2021, arXiv:2104.09864, in the half-split layout of HF checkpoints: with (a, b) the
    two halves of a head, (a cos - b sin, b cos + a sin).

    Args: qkv (batch, seq, (heads + 2 kv heads) * head_dim); cos, sin (batch or 1, seq,
        head_dim / 2); in_place: qkv is contiguous and may be overwritten.
    Returns: the rows in qkv's shape, in qkv itself or a new tensor.
    """
    dtype = compute_dtype(qkv)
    cos, sin = cast(cos, dtype), cast(sin, dtype)
    rotated = (num_heads + num_kv_heads) * 2 * cos.shape[-1]
    heads = qkv[..., :rotated].unflatten(-1, (-1, 2 * cos.shape[-1]))
    turned = cast(rotate_halves(cast(heads, dtype), cos, sin), qkv.dtype).flatten(-2)
    if not in_place or torch.compiler.is_compiling():
        # Compiled, writes become copies anyway, and torch 2.11 loses those through views.
        return torch.cat((turned, qkv[..., rotated:]), -1)
    qkv[..., :rotated] = turned
    return qkv


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Gradient of `rope_forward`: q's and k's turned back, v's copied, the three packed.

    Args: grad_q (batch, seq, heads, head_dim), grad_k, grad_v (batch, seq, kv heads, head_dim),
        any strides; cos, sin as there.
    Returns: (batch, seq, (heads + 2 kv heads) * head_dim), a new tensor.
    """
    dtype = compute_dtype(grad_q)
    cos, sin = cast(cos, dtype), cast(sin, dtype)
    turned = (cast(rotate_halves(cast(x, dtype), cos, -sin), x.dtype) for x in (grad_q, grad_k))
    return torch.cat((*turned, grad_v), -2).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a cos - b sin, b cos + a sin) for the halves (a, b) of each head in x."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
