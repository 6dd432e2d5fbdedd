"""The attention function: it chooses a backend for the mask and calls it.

| case on a GPU | backend |
| --- | --- |
| causal, or nothing is hidden; no cap | `sdpa` |
| causal with sinks, or one part of a row whose parts are on several GPUs; no cap, 16 bit | `raw` |
| window, cu_seqlens with max_seqlen, or padding at the ends of rows; no cap, 16 bit | `varlen` |
| heads of 257 to 512 on Hopper, without a mask of every pair; no cap, no sinks, 16 bit | `wide` |
| a mask of every pair, given by the caller; a single query | `dense` |
| anything else | `flex`; `dense` for short passes without gradient |

On other devices the backend is `sdpa`, or `dense` if there is a mask or a cap. On a CPU it is `raw`
instead of `sdpa` if there are sinks. `sdpa` is scaled_dot_product_attention with is_causal, or
without a mask. `dense` is the same function with a mask of every query-key pair, or the plain
formula if scores are capped or there are sinks. `varlen` is varlen_attn, `wide` is
`kernels.wide_attention`, `flex` is FlexAttention, and `raw` is the kernel of `sdpa`, called with
its log-sum-exp: on a GPU cuDNN's, and where that is slow or cannot compute the heads, the backend
is `varlen`.

A sink is a logit that a query head has beside those of the keys. No value belongs to it, so it only
lowers the weights of the keys: with the output and the log-sum-exp of the keys alone, the output is
out * sigmoid(lse - sink), and the log-sum-exp logaddexp(lse, sink). The backward of a kernel that
gets these two returns the gradients of q, k and v (arXiv:2309.17453; gpt-oss, arXiv:2508.10925).
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from ligermodels.kernels.dispatch import (
    Product,
    autocast_dtype,
    cast,
    real_device,
    simulator_of,
    without_autocast,
)
from ligermodels.kernels.wide_attention import LARGEST, wide_attention
from ligermodels.layers.attention_mask import AttentionMask, compiled

Backend = Literal["sdpa", "raw", "varlen", "wide", "flex", "dense"]

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
    sinks: bool = False,
) -> Backend:
    """Return the backend that attention uses.

    Args: rows: the number of (queries, keys) score matrices, which is batch * query heads.
    """
    is_plain = mask.is_causal(window) if causal else mask.hides_nothing(window, causal=False)
    is_plain = softcap is None and is_plain
    kind = device.type if device.type != "meta" else real_device(device).type
    is_short = dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None
    if (
        kind == "cuda"
        and is_short
        and 256 < head_dim <= LARGEST
        and mask.queries > 1
        and softcap is None
        and not sinks
        and mask.mask is None
        and _generation(device) == 9  # it has been measured on no other
    ):
        return "wide"
    if is_plain and not sinks:
        return "sdpa"
    if is_plain and kind == "cpu":
        return "raw"
    on_gpu = kind == "cuda" and dtype != torch.float64
    if not on_gpu or mask.mask is not None or mask.queries == 1:
        return "dense"
    whole = mask.past == 0 and mask.keys == mask.queries
    last = mask.is_part and mask.keys == mask.past + mask.queries
    if (
        softcap is None
        and is_short
        and head_dim % 8 == 0
        and head_dim <= 256
        and (mask.padding_mask is None or (mask.padding_at_ends and mask.document_ids is None))
        and (mask.prefix_lengths is None or not causal)
        and (whole or (last and causal and mask.padding_mask is None))
        and (mask.document_ids is None or mask.max_seqlen is not None)
    ):
        is_plain = is_plain or (last and mask.is_causal(window, mask.past))
        # From Hopper on, scaled_dot_product_attention takes cuDNN's kernel.
        return "raw" if is_plain and head_dim <= 128 and _generation(device) >= 9 else "varlen"
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
    sinks: Tensor | None = None,
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
        sinks: (heads,), a further logit of each head in the softmax, which has no value.
    Returns: (batch, heads, queries, head_dim). Queries that see no key get zeros. If the mask has
        padding_at_ends, those at padding may get other numbers.
    Raises:
        ValueError: the mask is made for another batch, or another number of queries or keys.
    """
    held = k.shape[2] if key_positions is None else mask.keys
    mask.check(q.shape[0], q.shape[2], held)
    rows = q.shape[0] * q.shape[1]
    has_sinks = sinks is not None
    options = (window, softcap, q.device, q.dtype, q.shape[-1], rows, causal, has_sinks)
    backend = choose_backend(mask, *options)
    if key_positions is not None and backend in ("sdpa", "raw", "varlen", "wide"):
        backend = "dense"  # these need the keys in order; a cache may reorder them
    simulator = simulator_of(q.device) if q.is_meta else None
    if simulator is not None:
        q = simulator.count_attention(backend, q, k, mask, window, softcap, causal)
    sdpa = F.scaled_dot_product_attention if simulator is None else simulator.sdpa
    if backend == "sdpa":
        # In a compiled model with dynamic lengths the comparison is symbolic; this makes it a bool.
        is_causal = True if causal and q.shape[2] > 1 else False
        k, v = heads_for_sdpa(q, k, v)
        return sdpa(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    if backend == "raw":
        return raw_attention(q, k, v, sinks, scale, causal)
    if backend == "varlen":
        return _varlen(q, k, v, sinks, mask, scale, window, causal)
    if backend == "wide":
        ranges = mask.key_ranges(window, q.shape[0], q.device, causal=causal)
        return wide_attention(q, k, v, *ranges, scale=scale)
    if backend == "flex" and simulator is not None:
        return simulator.flex(q, k, v, sinks, mask, window, causal)
    if backend == "flex":
        score_mod = None if softcap is None else _softcap_mod(softcap)
        blocks = None
        if not mask.hides_nothing(window, key_positions, causal=causal):
            blocks = mask.block_mask(window, q.shape[0], q.device, key_positions, causal=causal)
        found = compiled(flex_attention)(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=blocks,
            scale=scale,
            enable_gqa=True,
            kernel_options=_FLEX_OPTIONS,
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        return found if sinks is None else sunk(found[0], found[1].lse, sinks)
    visible = None
    if not mask.hides_nothing(window, key_positions, causal=causal):
        visible = mask.dense(window, q.device, key_positions, causal=causal)
    if softcap is None and sinks is None:
        return sdpa(q, k, v, visible, scale=scale, enable_gqa=True)
    with without_autocast(q):
        return _formula(q, k, v, sinks, visible, scale, softcap)


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
    sinks: bool = False,
) -> None:
    """Compute and cache the form of the mask that `attend` will need.

    The model calls this before its layers. A compiled layer under activation checkpointing must
    not have side effects, so it could not cache the mask itself.
    """
    for part in mask.parts(causal) if mask.shard is not None else ():
        prepare(part, window, softcap, batch, heads, device, dtype, head_dim, causal, sinks)
    if mask.shard is not None:
        return
    rows = batch * heads
    backend = choose_backend(mask, window, softcap, device, dtype, head_dim, rows, causal, sinks)
    if backend == "varlen":
        mask.varlen_seqlens(batch, device, window)
    elif backend == "wide":
        mask.key_ranges(window, batch, device, causal=causal)
    elif backend in ("sdpa", "raw") or mask.hides_nothing(window, causal=causal):
        return
    elif backend == "dense":
        mask.dense(window, device, causal=causal)
    elif simulator_of(device) is None:
        mask.block_mask(window, batch, device, causal=causal)


def _generation(device: torch.device) -> int:
    """Return the major compute capability of a GPU. Without a GPU, an H100 is simulated."""
    if not torch.cuda.is_available():
        return 9
    return torch.cuda.get_device_properties(real_device(device)).major


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


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Compute the formula in plain PyTorch, in float32 (float64 inputs: in float64).

    The query heads are grouped by the key head that they share.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = k.shape[1]
    q_grouped = q.to(dtype).unflatten(1, (groups, -1))
    scores = Product.apply(q_grouped, k.to(dtype).unsqueeze(2).mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = None if visible is None else ~visible.unsqueeze(2)
    if hidden is not None:
        # With -inf, a query that sees no key would become NaN. A finite minimum avoids this, and
        # the second fill sets its weights to zero.
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    if sinks is not None:
        logits = sinks.to(dtype).view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, logits), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return Product.apply(weights, v.to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


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
    sinks: Tensor | None,
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
    sizes = (seqlens.queries, seqlens.keys, seqlens.max_queries, seqlens.max_keys)
    ahead = 0 if causal else reach
    if sinks is not None:
        out = _VarlenWithSinks.apply(q, k, v, sinks, *sizes, scale, reach, ahead)
    else:
        options = _varlen_options()
        out = varlen_attn(q, k, v, *sizes, scale=scale, window_size=(reach, ahead), **options)
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)


_aten = torch.ops.aten


def sunk(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return attention's output with sinks, from that without them; a gradient flows through lse.

    Args: out (batch, heads, queries, head_dim); lse (batch, heads, queries); sinks (heads,).
    """
    if torch.compiler.is_compiling():
        return _sunk(out, lse, sinks)  # type: ignore[no-any-return]
    return (out * _share(lse, sinks)).to(out.dtype)


def _share(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return what the keys keep of each query's weights, (batch, heads, queries, 1)."""
    return torch.sigmoid(lse - sinks.to(lse.dtype)[:, None]).unsqueeze(-1)


# Beside FlexAttention, inductor of torch 2.11 pads the strides of (batch, heads, queries) and then
# reads some tensors with the others' strides: the gradients of these formulas were wrong where
# heads * queries is no multiple of 32. So it sees an op.
@torch.library.custom_op("ligermodels::sunk", mutates_args=())
def _sunk(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.mul(out, _share(lse, sinks), out=torch.empty_like(out))


@torch.library.custom_op("ligermodels::sunk_backward", mutates_args=())
def _sunk_backward(
    grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    share = _share(lse, sinks)
    each = (grad.to(lse.dtype) * out).sum(-1, keepdim=True) * share * (1 - share)
    grad_lse = torch.empty_like(lse).copy_(each.squeeze(-1))
    grad_out = torch.mul(grad, share, out=torch.empty_like(out))
    return grad_out, grad_lse, -grad_lse.sum((0, 2)).to(sinks.dtype)


@_sunk.register_fake
def _(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.empty_like(out)


@_sunk_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(lse), torch.empty_like(sinks)


def _save_for_sunk(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_sunk.register_autograd(
    lambda ctx, grad: _sunk_backward(grad, *ctx.saved_tensors), setup_context=_save_for_sunk
)


def _scaled(out: Tensor, share: Tensor) -> Tensor:
    """Return out * share, written into out in eager mode.

    A function that torch 2.11 compiles gets no gradients through an output that an autograd
    function has changed in place.
    """
    return cast(out * share, out.dtype) if torch.compiler.is_compiling() else out.mul_(share)


def _sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, which have one more dimension than the rows of out and lse.

    Args: grad, out: (..., head_dim), of attention with the sinks; lse: (..., 1), theirs, too.
    """
    weight = torch.exp(sinks - lse)
    each = weight * (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
    return -each.sum_to_size(sinks.shape)


class _VarlenWithSinks(torch.autograd.Function):
    """The kernel of varlen_attn, whose own backward ignores the gradient of its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        queries: Tensor,
        keys: Tensor,
        max_queries: int,
        max_keys: int,
        scale: float,
        reach: int,
        ahead: int,
    ) -> Tensor:
        ctx.sizes = max_queries, max_keys
        ctx.options = {"scale": scale, "window_size_left": reach, "window_size_right": ahead}
        out, lse, *state, _ = _aten._flash_attention_forward(
            q, k, v, queries, keys, *ctx.sizes, 0.0, False, False, **ctx.options
        )
        shape, lse = lse.shape, lse.flatten()
        logits = sinks.to(lse.dtype)[:, None].expand(shape).flatten()
        out = _scaled(out, torch.sigmoid(lse - logits).view(shape).t().unsqueeze(-1))
        lse = torch.logaddexp(lse, logits)
        ctx.save_for_backward(q, k, v, sinks, queries, keys, out, lse, *state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, queries, keys, out, lse, *state = ctx.saved_tensors
        lse = lse.view(out.shape[1], -1)
        dq, dk, dv = _aten._flash_attention_backward(
            *(grad, q, k, v, out, lse, queries, keys, *ctx.sizes, 0.0, False, *state), **ctx.options
        )
        dsinks = None
        if ctx.needs_input_grad[3]:
            logits = sinks.to(lse.dtype)[:, None]
            dsinks = _sinks_gradient(grad, out, lse.t().unsqueeze(-1), logits)
            dsinks = dsinks.view_as(sinks).to(sinks.dtype)
        return dq, dk, dv, dsinks, *(None,) * 7


def raw_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, causal: bool = True
) -> Tensor:
    """Return (batch, heads, queries, head_dim); causal queries are the last tokens of the keys.

    PyTorch's fastest kernels align the causal mask with the first key; queries with keys before
    them need it aligned with the last key. So attention is computed twice: without a mask over the
    keys before the queries, and with a causal mask over the queries' own keys. The two outputs are
    weighted by their sums of exponentials, as blocks of keys are in arXiv:2205.14135. The backward
    of each part uses the output and the log-sum-exp of the whole.

    Args: q (batch, heads, queries, head_dim); k, v (batch, kv heads, keys, head_dim); sinks
        (heads,), or None; scale, the factor on the scores.
    """
    return _RawAttention.apply(q, k, v, sinks, scale, causal)


class _RawAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        past = k.shape[2] - q.shape[2] if causal else 0
        out, lse, *state = _attend(q, k[:, :, past:], v[:, :, past:], causal, scale)
        # In one dimension, because inductor would pad strides, which the kernels' backward ignores.
        shape, lse = lse.shape, lse.flatten()
        if past:
            before, lse_before, *more = _attend(q, k[:, :, :past], v[:, :, :past], False, scale)
            # out = own + share * (before - own), in one float32 buffer
            share = torch.sigmoid(lse_before.flatten() - lse).view(shape)
            out = before.to(share.dtype).sub_(out).mul_(share).add_(out).to(q.dtype)
            lse = torch.logaddexp(lse_before.flatten(), lse)
            state += more
        if sinks is not None:
            logits = sinks.to(lse.dtype)[:, None, None].expand(shape).flatten()
            out = _scaled(out, torch.sigmoid(lse - logits).view(shape))
            lse = torch.logaddexp(lse, logits)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *state)
        ctx.options, ctx.past = (causal, scale), past
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse, *state = ctx.saved_tensors
        past, (causal, scale) = ctx.past, ctx.options
        lse = lse.view(*out.shape[:-1], 1)
        whole = (out, lse)
        if not past:
            dq, dk, dv = _attend_backward(grad, q, k, v, *whole, causal, scale, state)
        else:
            half, dk, dv = len(state) // 2, torch.empty_like(k), torch.empty_like(v)
            own, before = slice(past, None), slice(0, past)
            dq, dk[:, :, own], dv[:, :, own] = _attend_backward(
                grad, q, k[:, :, own], v[:, :, own], *whole, True, scale, state[:half]
            )
            more, dk[:, :, before], dv[:, :, before] = _attend_backward(
                grad, q, k[:, :, before], v[:, :, before], *whole, False, scale, state[half:]
            )
            dq = dq + more
        dsinks = None
        if ctx.needs_input_grad[3]:
            dsinks = _sinks_gradient(grad, out, lse, sinks.to(lse.dtype)[:, None, None])
            dsinks = dsinks.view_as(sinks).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return the output, the log-sum-exp (batch, heads, queries, 1), and what backward needs."""
    if real_device(q.device).type == "cpu":
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
    if real_device(q.device).type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, causal, scale=scale
        )
    sizes = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, out, lse, *state, None, None, None, *sizes, 0.0, causal), scale=scale
    )
