"""Attention itself: which backend takes which mask, and the call.

| on a GPU | |
| --- | --- |
| causal, no cap | `sdpa` |
| window or cu_seqlens with max_seqlen, no cap, 16 bit | `varlen` |
| anything else | `flex`; `dense` for a single query and for short passes without gradient |

Elsewhere it is `sdpa`, or `dense` where there is a mask or a cap. `sdpa` is
scaled_dot_product_attention with is_causal, `dense` the same with a mask of every pair (the plain
formula where scores are capped), `varlen` is varlen_attn and `flex` is FlexAttention.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ligermodels.kernels.autocast import without_autocast
from ligermodels.layers.attention_mask import AttentionMask, compiled

Backend = Literal["sdpa", "varlen", "flex", "dense"]

# Scores up to which a pass without gradient takes a dense mask rather than wait for FlexAttention
# to compile; they are 64 MiB in float32.
_DENSE_SCORES = 2**24


def choose_backend(
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
) -> Backend:
    """Which backend attention takes.

    Args: rows, batch times query heads: how many matrices of queries by keys there are.
    """
    if softcap is None and mask.is_causal(window):
        return "sdpa"
    on_gpu = device.type == "cuda" and dtype != torch.float64
    if not on_gpu or mask.mask is not None or mask.queries == 1:
        return "dense"
    if (
        softcap is None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.version.hip is None
        and mask.padding_mask is None
        and mask.past == 0
        and (mask.document_ids is None or mask.max_seqlen is not None)
    ):
        return "varlen"
    if not torch.is_grad_enabled() and rows * mask.queries * mask.keys <= _DENSE_SCORES:
        return "dense"
    return "flex"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """softmax(softcap * tanh(scale * q k^T / softcap), over the keys that the mask shows) v.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, kv heads, keys, head_dim).
        mask: which query sees which key.
        scale: factor on the scores.
        window: how many keys a query sees, its own included; default all.
        softcap: bound of the scores; default none.
        key_positions: (keys,) int64, which of the mask's keys k and v hold; default all, in order.
    Returns: (batch, heads, queries, head_dim); zeros for a query that sees nothing.
    """
    rows = q.shape[0] * q.shape[1]
    backend = choose_backend(mask, window, softcap, q.device, q.dtype, q.shape[-1], rows)
    if key_positions is not None and backend in ("sdpa", "varlen"):
        backend = "dense"  # these two want the keys in order, and a cache may have its own order
    if backend == "sdpa":
        # A bool, and not the symbolic one of a compiled model with lengths that change.
        causal = True if q.shape[2] > 1 else False
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )
    if backend == "varlen":
        return _varlen(q, k, v, mask, scale, window)
    if backend == "flex":
        score_mod = None if softcap is None else _softcap_mod(softcap)
        blocks = mask.block_mask(window, q.shape[0], q.device, key_positions)
        return compiled(flex_attention)(
            q, k, v, score_mod=score_mod, block_mask=blocks, scale=scale, enable_gqa=True
        )
    visible = None
    if not mask.hides_nothing(window, key_positions):
        visible = mask.dense(window, q.device, key_positions)
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

    This happens ahead of the layers, because a compiled layer under activation checkpointing may
    leave nothing behind but its output.
    """
    backend = choose_backend(mask, window, softcap, device, dtype, head_dim, batch * heads)
    if backend == "flex":
        mask.block_mask(window, batch, device)
    elif backend == "dense" and not mask.hides_nothing(window):
        mask.dense(window, device)
    elif backend == "varlen":
        mask.varlen_seqlens(batch, device)


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
def _softcap_mod(softcap: float) -> Callable[..., Tensor]:
    """softcap * tanh(score / softcap); one object per cap, since each new one is compiled."""

    def capped(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


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
    cu_seqlens, longest = mask.varlen_seqlens(batch, q.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else min(window, longest) - 1, 0),
        **_varlen_options(),
    )
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)
