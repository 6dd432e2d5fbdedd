"""Rotary position embedding of packed query, key and value rows; one launch rotates q and k."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_floating, check_rope
from ligermodels.kernels.dispatch import apply, refuse_double_backward, select


def split_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the views q (..., heads, head_dim), k and v (..., kv heads, head_dim) of qkv."""
    *shape, columns = qkv.shape
    heads = num_heads + 2 * num_kv_heads
    # unflatten and split are written in Python and slower on the host than these two.
    packed = qkv.view(*shape, heads, columns // heads)
    q, k, v = packed.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), -2)
    return q, k, v


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_heads: int,
        num_kv_heads: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.ops, ctx.interleaved = select("rope", qkv), interleaved
        ctx.save_for_backward(cos, sin)
        output = ctx.ops.rope_forward(qkv, cos, sin, num_heads, num_kv_heads, False, interleaved)
        return split_qkv(output, num_heads, num_kv_heads)

    @staticmethod
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("rope")
        cos, sin = ctx.saved_tensors
        grad_qkv = ctx.ops.rope_backward(grad_q, grad_k, grad_v, cos, sin, ctx.interleaved)
        return grad_qkv, *[None] * 5


def rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed qkv into q, k, v and rotate q and k by the angles of their positions.

    Args: qkv: (batch, seq, (heads + 2 kv heads) * head_dim), with columns in the order q, k, v;
        cos, sin: (batch or 1, seq, rotated / 2) float32, where `rotated` is the number of elements
        of a head that are rotated: the first ones, at most head_dim; with 0, q, k and v are views
        of qkv; interleaved: whether the pairs that rotate together are neighbours. By default, they
        are half of `rotated` apart.
    Returns: q (batch, seq, heads, head_dim), k and v (batch, seq, kv heads, head_dim) in qkv's
        dtype. qkv is not modified; cos and sin get no gradient.
    Raises: ValueError if the shapes do not fit the numbers of heads, or a tensor is not floating
        point.
    Source: arXiv:2104.09864, whose layout is the interleaved one.
    """
    check_floating("rope", "qkv", qkv)
    heads = check_rope("rope", qkv.shape, cos, sin, num_heads, num_kv_heads)
    if cos.shape[-1] == 0:
        return split_qkv(qkv, *heads)
    return apply(_Rope, qkv, cos, sin, *heads, interleaved)
