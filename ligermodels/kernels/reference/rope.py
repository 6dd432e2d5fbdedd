"""Plain PyTorch: rotary position embedding of packed rows."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype


def rope_forward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    in_place: bool,
    interleaved: bool = False,
) -> Tensor:
    """Rotate q and k within packed rows. v does not change.

    Su et al. 2021, arXiv:2104.09864: a pair (a, b) becomes (a cos - b sin, b cos + a sin). The
    pairs are neighbours if `interleaved` is set; otherwise the two halves of what is rotated form
    them, as in most HF checkpoints. Elements of a head after the first 2 * (columns of cos) do not
    change.

    Args: qkv: (batch, seq, (heads + 2 kv heads) * head_dim); cos, sin: (batch or 1, seq,
        rotated / 2); in_place: whether qkv, which must be contiguous, may be overwritten.
    Returns: the rotated rows in qkv's shape: qkv itself or a new tensor.
    """
    dtype = compute_dtype(qkv)
    if cos.dtype != dtype:
        cos, sin = cos.to(dtype), sin.to(dtype)
    heads, rotated = num_heads + num_kv_heads, 2 * cos.shape[-1]
    writes = qkv.dtype == dtype and not torch.compiler.is_compiling()
    if writes and not in_place:
        qkv = qkv.clone()
    total = heads + num_kv_heads
    packed = qkv.view(*qkv.shape[:-1], total, qkv.shape[-1] // total)
    first = packed.narrow(-2, 0, heads).narrow(-1, 0, rotated)
    if writes:
        a, b = (first[..., ::2], first[..., 1::2]) if interleaved else first.chunk(2, -1)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        a_sin, b_sin = a * sin, b * sin
        a.mul_(cos).sub_(b_sin)
        b.mul_(cos).add_(a_sin)
        return qkv
    turned = cast(rotate(cast(first, dtype), cos, sin, interleaved), qkv.dtype)
    if not in_place or torch.compiler.is_compiling():
        # torch.compile turns the write into a copy anyway, and torch 2.11 loses writes to views.
        turned = torch.cat((turned, packed[..., :heads, rotated:]), -1)
        return torch.cat((turned, packed[..., heads:, :]), -2).flatten(-2)
    first.copy_(turned)
    return qkv


def rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """Compute the gradient of `rope_forward`: rotate grad_q and grad_k back, pack all three.

    Args: grad_q: (batch, seq, heads, head_dim); grad_k, grad_v: (batch, seq, kv heads, head_dim);
        all three with any strides; cos, sin, interleaved: as in `rope_forward`.
    Returns: (batch, seq, (heads + 2 kv heads) * head_dim), a new tensor.
    """
    dtype, rotated = compute_dtype(grad_q), 2 * cos.shape[-1]
    cos, sin = cast(cos, dtype), -cast(sin, dtype)

    def back(x: Tensor) -> Tensor:
        turned = cast(rotate(cast(x[..., :rotated], dtype), cos, sin, interleaved), x.dtype)
        return torch.cat((turned, x[..., rotated:]), -1)

    return torch.cat((back(grad_q), back(grad_k), grad_v), -2).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return (a cos - b sin, b cos + a sin) for the pairs (a, b) of each head in x."""
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
