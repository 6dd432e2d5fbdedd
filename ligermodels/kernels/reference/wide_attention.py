"""Plain PyTorch: attention with heads of any size, in which each query sees a range of keys."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype

Ranges = tuple[Tensor, Tensor, Tensor, Tensor]
Ids = tuple[Tensor | None, Tensor | None]


def _weights(
    q: Tensor, k: Tensor, ranges: Ranges, ids: Ids, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores (batch, kv heads, group, queries, keys), what hides, and k."""
    dtype = compute_dtype(q)
    groups, key = k.shape[1], torch.arange(k.shape[2], device=k.device)
    first, end = (x[..., None] for x in ranges[:2])
    visible = (key >= first) & (key < end)
    if ids[0] is not None and ids[1] is not None:
        visible = visible & (ids[0][:, :, None] == ids[1][:, None])
    wide = cast(k, dtype).unsqueeze(2)
    scores = cast(q, dtype).unflatten(1, (groups, -1)) @ wide.mT * scale
    return scores, ~visible[:, None, None], wide


def wide_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: Ranges, ids: Ids, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q k^T) v of the visible keys, and the log-sum-exp of the scores.

    Args: as in `kernels.wide_attention`.
    Returns: (batch, heads, queries, head_dim) in q's dtype; (batch, heads, queries) in float32
        (float64 for float64). A query that sees no key gets zeros, and -inf.
    """
    scores, hidden, _ = _weights(q, k, ranges, ids, scale)
    lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0)
    out = weights @ cast(v, weights.dtype).unsqueeze(2)
    return cast(out.flatten(1, 2), q.dtype), lse.flatten(1, 2)


def wide_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Ranges,
    ids: Ids,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their dtypes; arXiv:2205.14135, algorithm 4."""
    scores, hidden, wide = _weights(q, k, ranges, ids, scale)
    dtype, groups = scores.dtype, k.shape[1]
    grad, out, q_wide = (cast(x, dtype).unflatten(1, (groups, -1)) for x in (grad, out, q))
    lse = lse.unflatten(1, (groups, -1))
    weights = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0)
    dv = (weights.mT @ grad).sum(2)
    slopes = grad @ cast(v, dtype).unsqueeze(2).mT - (grad * out).sum(-1, keepdim=True)
    slopes = weights * slopes * scale
    dq, dk = (slopes @ wide).flatten(1, 2), (slopes.mT @ q_wide).sum(2)
    return cast(dq, q.dtype), cast(dk, k.dtype), cast(dv, v.dtype)
