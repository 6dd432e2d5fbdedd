"""Attention itself: which implementation takes which mask, and the call.

| on a GPU | |
| --- | --- |
| causal, no cap | scaled_dot_product_attention |
| window or cu_seqlens with max_seqlen, no cap, 16 bit | varlen_attn |
| anything else | flex_attention; a single query, and short passes without gradient: dense |

Elsewhere: scaled_dot_product_attention, with a dense mask where there is one; scores that are
capped are computed as written.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.autocast import without_autocast
from ligermodels.layers import flex
from ligermodels.layers.attention_mask import AttentionMask

# Scores up to which a pass without gradient takes a dense mask rather than wait for FlexAttention
# to compile; they are 64 MiB in float32.
_DENSE_SCORES = 2**24


def implementation(
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
) -> str:
    """Which of "causal", "varlen", "blocks" and "dense" attention takes.

    Args: rows, batch times query heads: how many matrices of queries by keys there are.
    """
    if softcap is None and mask.is_causal(window):
        return "causal"
    if device.type != "cuda" or mask.visible is not None or dtype == torch.float64:
        return "dense"
    if mask.queries == 1:
        return "dense"
    if (
        softcap is None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.version.hip is None
        and mask.tokens is None
        and mask.past == 0
        and (mask.documents is None or mask.max_seqlen is not None)
    ):
        return "varlen"
    if not torch.is_grad_enabled() and rows * mask.queries * mask.keys <= _DENSE_SCORES:
        return "dense"
    return "blocks"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """softmax(softcap * tanh(scale * q k^T / softcap), where the mask lets it) v.

    Args:
        q (batch, heads, queries, head_dim); k, v (batch, kv heads, keys, head_dim).
        columns: (keys,), which of the mask's keys k and v hold; default all, in order.
    Returns: (batch, heads, queries, head_dim); zeros for a query that sees nothing.
    """
    rows = q.shape[0] * q.shape[1]
    how = implementation(mask, window, softcap, q.device, q.dtype, q.shape[-1], rows)
    if columns is not None and how in ("causal", "varlen"):
        how = "dense"  # these two want the keys in order, and a cache may have one of its own
    if how == "causal":
        # A bool, and not the symbolic one of a compiled model with lengths that change.
        causal = True if q.shape[2] > 1 else False
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )
    if how == "varlen":
        return _varlen(q, k, v, mask, scale, window)
    if how == "blocks":
        blocks = mask.blocks(window, q.shape[0], q.device, columns)
        return flex.attend(q, k, v, blocks, scale, softcap)
    visible = None if mask.is_open(window, columns) else mask.dense(window, q.device, columns)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)
    with without_autocast(q):
        return _capped(q, k, v, visible, scale, softcap)


def prepare(
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    batch: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
) -> None:
    """Make the form of the mask that `attend` will ask for.

    Ahead of the layers, because a layer under activation checkpointing may not, when compiled,
    leave anything behind but its output.
    """
    how = implementation(mask, window, softcap, device, dtype, head_dim, batch * heads)
    if how == "blocks":
        mask.blocks(window, batch, device)
    elif how == "dense" and not mask.is_open(window):
        mask.dense(window, device)
    elif how == "varlen":
        mask.ends(batch, device)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """The formula as written, in float32 (float64 for float64), one group of heads per key."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = k.shape[1]
    q_grouped = q.to(dtype).unflatten(1, (groups, -1))
    scores = q_grouped @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        weights = scores.softmax(-1)
    else:
        hidden = ~visible.unsqueeze(2)
        # A finite minimum and zeros after: a row that sees nothing must not become NaN.
        weights = scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1)
        weights = weights.masked_fill(hidden, 0.0)
    return (weights @ v.to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


@cache
def _varlen_options() -> dict[str, Any]:
    """Grouped heads have to be asked for in newer torch and are understood in older."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch = q.shape[0]
    ends, longest = mask.ends(batch, q.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else min(window, longest) - 1, 0),
        **_varlen_options(),
    )
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)
