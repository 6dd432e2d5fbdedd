"""The attention function: it chooses a backend for the mask and calls it.

| case on a GPU | backend |
| --- | --- |
| causal, or nothing is hidden; no cap | `sdpa` |
| causal, for one part of a row whose parts are on several GPUs; no cap, 16 bit | `suffix` |
| window, cu_seqlens with max_seqlen, or padding at the ends of rows; no cap, 16 bit | `varlen` |
| a mask of every pair, given by the caller; a single query | `dense` |
| anything else | `flex`; `dense` for short passes without gradient |

On other devices the backend is `sdpa`, or `dense` if there is a mask or a cap. `sdpa` is
scaled_dot_product_attention with is_causal, or without a mask. `dense` is the same function with a
mask of every query-key pair, or the plain formula if scores are capped. `varlen` is varlen_attn,
`flex` is FlexAttention, and `suffix` is cuDNN's attention in two calls; where it is slow or cannot
compute the heads, it is `varlen`.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ligermodels.kernels.dispatch import autocast_dtype, real_device, simulator_of, without_autocast
from ligermodels.layers.attention_mask import AttentionMask, compiled

Backend = Literal["sdpa", "suffix", "varlen", "flex", "dense"]

# With at most this many scores, a pass without gradient uses a dense mask, because FlexAttention
# would have to compile first. In float32 these scores take 64 MiB.
_DENSE_SCORES = 2**24

# For fewer than 128 queries, FlexAttention would take its kernel for decoding, which cannot be
# compiled if the query heads of a key head have more than 128 queries together.
_FLEX_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}


def choose_backend(
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    causal: bool = True,
) -> Backend:
    """Return the backend that attention uses.

    Args: rows: the number of (queries, keys) score matrices, which is batch * query heads.
    """
    is_plain = mask.is_causal(window) if causal else mask.hides_nothing(window, causal=False)
    if softcap is None and is_plain:
        return "sdpa"
    kind = device.type if device.type != "meta" else real_device(device).type
    on_gpu = kind == "cuda" and dtype != torch.float64
    if not on_gpu or mask.mask is not None or mask.queries == 1:
        return "dense"
    whole = mask.past == 0 and mask.keys == mask.queries
    last = mask.is_part and mask.keys == mask.past + mask.queries
    if (
        softcap is None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.version.hip is None
        and (mask.padding_mask is None or (mask.padding_at_ends and mask.document_ids is None))
        and (mask.prefix_lengths is None or not causal)
        and (whole or (last and causal and mask.padding_mask is None))
        and (mask.document_ids is None or mask.max_seqlen is not None)
    ):
        is_suffix = last and mask.is_causal(window, mask.past)
        return "suffix" if is_suffix and head_dim <= 128 and _prefers_cudnn(device) else "varlen"
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
    causal: bool = True,
) -> Tensor:
    """Compute softmax(softcap * tanh(scale * q k^T / softcap)) v over the keys that q may see.

    Args:
        q: (batch, heads, queries, head_dim).
        k, v: (batch, kv heads, keys, head_dim).
        mask: the mask that says which keys each query sees.
        scale: factor on the scores.
        window: a query sees only keys that are less than this number of positions away. By default
            it sees all.
        softcap: bound of the scores. By default they are not capped.
        key_positions: (keys,) int64, the positions of the keys in k and v. By default k and v hold
            all of the mask's keys in order.
        causal: whether a query sees no key after its own position.
    Returns: (batch, heads, queries, head_dim). Queries that see no key get zeros. If the mask has
        padding_at_ends, those at padding may get other numbers.
    Raises:
        ValueError: the mask is made for another batch, or another number of queries or keys.
    """
    held = k.shape[2] if key_positions is None else mask.keys
    mask.check(q.shape[0], q.shape[2], held)
    rows = q.shape[0] * q.shape[1]
    backend = choose_backend(mask, window, softcap, q.device, q.dtype, q.shape[-1], rows, causal)
    if key_positions is not None and backend in ("sdpa", "varlen"):
        backend = "dense"  # sdpa and varlen need the keys in order; a cache may reorder them
    simulator = simulator_of(q.device) if q.is_meta else None
    if simulator is not None:
        return simulator.attend(
            backend, q, k, v, mask=mask, scale=scale, window=window, softcap=softcap, causal=causal
        )
    if backend == "sdpa":
        # In a compiled model with dynamic lengths the comparison is symbolic; this makes it a bool.
        is_causal = True if causal and q.shape[2] > 1 else False
        k, v = heads_for_sdpa(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True
        )
    if backend == "suffix":
        return causal_suffix(q, k, v, scale)
    if backend == "varlen":
        return _varlen(q, k, v, mask, scale, window, causal)
    if backend == "flex":
        score_mod = None if softcap is None else _softcap_mod(softcap)
        blocks = None
        if not mask.hides_nothing(window, key_positions, causal=causal):
            blocks = mask.block_mask(window, q.shape[0], q.device, key_positions, causal=causal)
        return compiled(flex_attention)(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=blocks,
            scale=scale,
            enable_gqa=True,
            kernel_options=_FLEX_OPTIONS,
        )
    visible = None
    if not mask.hides_nothing(window, key_positions, causal=causal):
        visible = mask.dense(window, q.device, key_positions, causal=causal)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)
    with without_autocast(q):
        return _capped(q, k, v, visible, scale, softcap)


def attend_in_parts(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    causal: bool = True,
) -> Tensor:
    """Return attention(q, k, v, mask); under a sharded mask, call it chunk by chunk."""
    if mask.shard is None:
        return attention(q, k, v, mask)
    parts = mask.parts(causal)
    return torch.cat(
        [
            attention(chunk, k[:, :, : part.keys], v[:, :, : part.keys], part)
            for chunk, part in zip(q.chunk(len(parts), 2), parts)
        ],
        2,
    )


def prepare(
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    batch: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool = True,
) -> None:
    """Compute and cache the form of the mask that `attend` will need.

    The model calls this before its layers. A compiled layer under activation checkpointing must
    not have side effects, so it could not cache the mask itself.
    """
    for part in mask.parts(causal) if mask.shard is not None else ():
        prepare(part, window, softcap, batch, heads, device, dtype, head_dim, causal)
    if mask.shard is not None:
        return
    rows = batch * heads
    backend = choose_backend(mask, window, softcap, device, dtype, head_dim, rows, causal)
    if backend == "varlen":
        mask.varlen_seqlens(batch, device, window)
    elif backend in ("sdpa", "suffix") or mask.hides_nothing(window, causal=causal):
        return
    elif backend == "dense":
        mask.dense(window, device, causal=causal)
    elif simulator_of(device) is None:
        mask.block_mask(window, batch, device, causal=causal)


def _prefers_cudnn(device: torch.device) -> bool:
    """Return whether scaled_dot_product_attention takes cuDNN's kernel, as it does from Hopper on.

    Without a GPU, an H100 is simulated.
    """
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties(real_device(device)).major >= 9


def heads_for_sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with one head for each query head, where a GPU's kernels need that.

    In float32, and with a head_dim above 256, no fused kernel takes grouped heads. PyTorch would
    compute the formula instead, with all scores in memory. The memory-efficient kernel takes as
    many key heads as query heads. A single query has few scores, so its heads stay grouped.
    """
    dtype = autocast_dtype(q) or q.dtype
    fused = dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    if real_device(q.device).type != "cuda" or dtype == torch.float64 or fused or q.shape[2] == 1:
        return k, v
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return k, v
    k, v = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    return k, v


def _capped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Compute the formula in plain PyTorch, in float32 (float64 inputs: in float64).

    The query heads are grouped by the key head that they share.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = k.shape[1]
    q_grouped = q.to(dtype).unflatten(1, (groups, -1))
    scores = q_grouped @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        weights = scores.softmax(-1)
    else:
        hidden = ~visible.unsqueeze(2)
        # With -inf, a query that sees no key would become NaN. A finite minimum avoids this, and
        # the second fill sets its weights to zero.
        weights = scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1)
        weights = weights.masked_fill(hidden, 0.0)
    return (weights @ v.to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


@cache
def _softcap_mod(softcap: float) -> Callable[..., Tensor]:
    """Return FlexAttention's score_mod for softcap * tanh(score / softcap).

    The cache returns one function per cap, because each new function object is compiled again.
    """

    def capped(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _varlen_options() -> dict[str, Any]:
    """Return {"enable_gqa": True} if varlen_attn has that option.

    Newer torch versions need the option for grouped heads; older ones always accept them.
    """
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
    window: int | None,
    causal: bool,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch = q.shape[0]
    seqlens = mask.varlen_seqlens(batch, q.device, window)
    if seqlens.first_key:
        k, v = k[:, :, seqlens.first_key :], v[:, :, seqlens.first_key :]
    if seqlens.seen is not None:
        # The kernel does not write the gradients of keys that are in no document.
        k, v = (torch.where(seqlens.seen[:, None], x, 0.0) for x in (k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    reach = -1 if window is None else min(window, seqlens.max_keys) - 1
    out = varlen_attn(
        q,
        k,
        v,
        seqlens.queries,
        seqlens.keys,
        seqlens.max_queries,
        seqlens.max_keys,
        scale=scale,
        window_size=(reach, 0 if causal else reach),
        **_varlen_options(),
    )
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)


_aten = torch.ops.aten


def causal_suffix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return (batch, heads, queries, head_dim); the queries are the last tokens of the keys.

    PyTorch's fastest kernels align the causal mask with the first key; these queries need it
    aligned with the last key. So attention is computed twice: without a mask over the keys before
    the queries, and with a causal mask over the queries' own keys. The two outputs are weighted by
    their sums of exponentials, as blocks of keys are in arXiv:2205.14135. The backward of each part
    uses the output and the log-sum-exp of the whole.

    Args: q (batch, heads, queries, head_dim); k, v (batch, kv heads, keys, head_dim), more keys
        than queries; scale, the factor on the scores.
    """
    return _CausalSuffix.apply(q, k, v, scale)


class _CausalSuffix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        past = k.shape[2] - q.shape[2]
        before, lse_before, *state = _attend(q, k[:, :, :past], v[:, :, :past], False, scale)
        own, lse_own, *state_own = _attend(q, k[:, :, past:], v[:, :, past:], True, scale)
        # out = own + share * (before - own), in one float32 buffer
        share = torch.sigmoid(lse_before - lse_own)
        out = before.to(share.dtype).sub_(own).mul_(share).add_(own).to(q.dtype)
        lse = torch.logaddexp(lse_before, lse_own)
        ctx.save_for_backward(q, k, v, out, lse, *state, *state_own)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *states = ctx.saved_tensors
        past, half = k.shape[2] - q.shape[2], len(states) // 2
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dq = None
        for keys, causal, state in (
            (slice(past, None), True, states[half:]),
            (slice(0, past), False, states[:half]),
        ):
            more, dk[:, :, keys], dv[:, :, keys] = _attend_backward(
                grad, q, k[:, :, keys], v[:, :, keys], out, lse, causal, ctx.scale, state
            )
            dq = more if dq is None else dq + more
        return dq, dk, dv, None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return the output, the log-sum-exp (batch, heads, queries, 1), and what backward needs."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse.unsqueeze(-1)
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse, seed, offset


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `_attend`."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, causal, scale=scale
        )
    sizes = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, out, lse, *state, None, None, None, *sizes, 0.0, causal), scale=scale
    )
