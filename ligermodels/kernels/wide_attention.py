"""Attention with heads of 257 to 512 elements, for which PyTorch has no fast kernel."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import misfit
from ligermodels.kernels.dispatch import refuse_double_backward, select, without_autocast
from ligermodels.kernels.launch import cdiv

LARGEST = 512  # elements of a head
MOST_PROGRAMS = 65_535  # that CUDA takes on the second and third axis of a grid


class _WideAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, *rest: Tensor | None
    ) -> Tensor:
        ctx.ops, ctx.scale = select("wide_attention", q), scale
        out, lse = ctx.ops.wide_attention_forward(q, k, v, rest[:4], rest[4:], scale)
        ctx.save_for_backward(q, k, v, out, lse, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_double_backward("wide_attention")
        q, k, v, out, lse, *rest = ctx.saved_tensors
        options = tuple(rest[:4]), tuple(rest[4:]), ctx.scale
        with without_autocast(grad):
            grads = ctx.ops.wide_attention_backward(grad, q, k, v, out, lse, *options)
        return *grads, None, *(None,) * len(rest)


def wide_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: tuple[Tensor, Tensor, Tensor, Tensor],
    ids: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
) -> Tensor:
    """Compute softmax(scale * q k^T) v, where each query sees a range of keys.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, kv heads, keys, head_dim), in q's dtype.
        ranges: for each query, the first key that it sees and the one after the last one, both
            (batch or 1, queries) int32; for each key, the first query that sees it and the one
            after the last one, both (batch or 1, keys) int32. None of these numbers is smaller
            than that of the query, or key, before.
        ids: (batch, queries) and (batch, keys) int32. A query sees only keys of its own id. By
            default it sees all in its range.
        scale: factor on the scores.
    Returns: (batch, heads, queries, head_dim). Queries that see no key get zeros.
    Raises:
        ValueError: a shape or dtype does not fit.
    Source: arXiv:2205.14135, arXiv:2305.13245.
    """
    heads, head_dim = q.shape[1], q.shape[3]
    fits = k.shape == v.shape and k.shape[::3] == q.shape[::3] and q.dtype == k.dtype == v.dtype
    if not fits or heads % k.shape[1] or head_dim > LARGEST:
        expected = (
            "(batch, heads, queries, head_dim) and (batch, kv heads, keys, head_dim) twice, of one "
            f"dtype, with heads of {LARGEST} at most"
        )
        raise misfit("wide_attention", expected, q=q, k=k, v=v)
    rest = [x if x is None else x.contiguous() for x in (*ranges, *(ids or (None, None)))]
    most = max(1, MOST_PROGRAMS // heads)  # rows of the batch in a launch
    with without_autocast(q):
        if len(q) <= most:
            return _WideAttention.apply(q, k, v, scale, *rest)
        parts = [
            [x] * cdiv(len(q), most) if x is None or len(x) == 1 else x.split(most)
            for x in (q, k, v, *rest)
        ]
        return torch.cat([_WideAttention.apply(*x[:3], scale, *x[3:]) for x in zip(*parts)])
