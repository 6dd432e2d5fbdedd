"""Attention in eager PyTorch, with which the tests compare every layer that attends."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first elements of each head of x (batch, seq, heads, head_dim)."""
    first, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    a, b = first.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else first.chunk(2, -1)
    turned = torch.complex(a, b) * torch.complex(cos, sin).unsqueeze(-2)
    pair = turned.real, turned.imag
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((joined, rest), -1)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend heads (batch, heads, seq, head_dim) to grouped ones; a query may see no key.

    Args: sees: (batch, 1, queries, keys), or what expands to it; True if a query sees a key; sinks:
        (heads,), a further logit of each head.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * torch.einsum("bhqd,bhkd->bhqk", q, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores) * sees
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks)[:, None, None]
    return torch.einsum("bhqk,bhkd->bhqd", weights / total.where(total > 0, 1.0), v)
