"""Rotary position embedding on packed query/key/value rows, q and k in one launch."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_count, check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select


def split_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q (batch, seq, heads, head_dim), k and v (batch, seq, kv heads, head_dim) of qkv."""
    *shape, columns = qkv.shape
    heads = num_heads + 2 * num_kv_heads
    # view and split_with_sizes: unflatten and split, written in Python, take the host longer.
    packed = qkv.view(*shape, heads, columns // heads)
    q, k, v = packed.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), -2)
    return q, k, v


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads):
        ctx.ops = select("rope", qkv)
        ctx.save_for_backward(cos, sin)
        out = ctx.ops.rope_forward(qkv, cos, sin, num_heads, num_kv_heads, False)
        return split_qkv(out, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        refuse_double_backward("rope")
        cos, sin = ctx.saved_tensors
        grad = ctx.ops.rope_backward(grad_q, grad_k, grad_v, cos, sin)
        return grad, None, None, None, None


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed qkv into q, k, v and rotate q and k by their positions' angles.

    Args: qkv (batch, seq, (heads + 2 kv heads) * head_dim), rows in the order q, k, v;
        cos, sin (batch or 1, seq, head_dim / 2) float32.
    Returns: q (batch, seq, heads, head_dim), k and v (batch, seq, kv heads, head_dim) in qkv's
        dtype. qkv is left intact; cos and sin are not differentiated. Source: arXiv:2104.09864,
        half-split layout.
    Raises: ValueError where shapes and numbers of heads do not agree, or for tensors that are not
        floating point.
    """
    check_floating("rope", "qkv", qkv)
    heads = check_rope("rope", qkv.shape, cos, sin, num_heads, num_kv_heads)
    return _Rope.apply(qkv, cos, sin, *heads)


def check_rope(
    op: str, shape: torch.Size, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[int, int]:
    """Both numbers of heads as ints.

    Raises: ValueError for less than one head or none of keys and values, and where packed columns,
        heads and the shapes of cos and sin do not agree, or cos and sin are not floating point.
    """
    # Not their sum alone: a kernel would write heads that are not there.
    num_heads = check_count(op, "num_heads", num_heads, 1)
    num_kv_heads = check_count(op, "num_kv_heads", num_kv_heads, 0)
    check_floating(op, "cos", cos)
    check_floating(op, "sin", sin)
    if len(shape) != 3 or cos.ndim != 3 or cos.shape[-1] == 0:
        raise ValueError(
            f"{op}: packed rows {tuple(shape)} and cos {tuple(cos.shape)}; expected "
            "(batch, seq, columns) and (batch or 1, seq, head_dim / 2) of 1 or more"
        )
    if sin.shape != cos.shape:
        raise ValueError(f"{op}: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    batch, seq, columns = shape
    head_dim = 2 * cos.shape[-1]
    if columns != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"{op}: {columns} packed columns are not ({num_heads} + 2 * {num_kv_heads}) heads "
            f"of {head_dim}, the head_dim of cos {tuple(cos.shape)}"
        )
    if cos.shape[0] not in (1, batch) or cos.shape[1] != seq:
        raise ValueError(
            f"{op}: cos {tuple(cos.shape)} does not fit {batch} rows of {seq} tokens; "
            f"expected ({batch} or 1, {seq}, {head_dim // 2})"
        )
    return num_heads, num_kv_heads
