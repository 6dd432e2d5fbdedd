"""Compare attention with a dense formula in float64: grouped heads, masks, packing, wrappers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ligermodels.layers import Attention, AttentionContext, RMSNorm, RotaryEmbedding, pre_norm
from ligermodels.layers.attention_mask import AttentionMask, document_ids_from_positions
from ligermodels.layers.kv_cache import KVCache
from tests.layers.formulas import attended, rotated
from tests.models.pairs import relative
from tests.pairwise import pairwise

HIDDEN, SEQ, BATCH, HEAD_DIM = 24, 11, 2, 6
PLAIN = torch.arange(SEQ)[None]
PACKED = torch.tensor([[*range(4), 0, 1, 0, *range(4)], [*range(SEQ)]])


def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    assert isinstance(norm, RMSNorm)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return x * scale * (norm.weight + norm.offset)


def dense(attention: Attention, x: Tensor, context: AttentionContext, sees: Tensor) -> Tensor:
    """Compute attention by its formula. sees (batch, seq, seq) is True if a query sees a key."""
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    width = 2 if attention.output_gate else 1
    qkv = attention.qkv_proj(x).unflatten(-1, (width * heads + 2 * groups, size))
    q, k, v = qkv.split([width * heads, groups, groups], -2)
    q, gates = q[..., ::width, :], q[..., 1::width, :]
    cos, sin = (angles.to(x.dtype) for angles in (context.cos, context.sin))
    q, k = normed(attention.q_norm, q), normed(attention.k_norm, k)
    if attention.rotary_dim:
        q, k = (rotated(x, cos, sin, attention.interleaved_rope) for x in (q, k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attended(q, k, v, sees[:, None], attention.scale, attention.softcap, attention.sinks)
    out = out.transpose(1, 2)
    return attention.o_proj((out * gates.sigmoid() if width == 2 else out).flatten(-2))


def context_of(positions: Tensor, mask: Any = None, rotary_dim: int = HEAD_DIM) -> AttentionContext:
    return AttentionContext(*RotaryEmbedding(rotary_dim)(positions), mask)


def head_norm(offset: float, seed: int) -> RMSNorm:
    norm = RMSNorm(HEAD_DIM, offset=offset, casting_mode="gemma" if offset else "llama")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        norm.weight += torch.randn(HEAD_DIM, generator=generator) * 0.3
    return norm


# Which norms the heads have, and the offsets of their weights.
NORMS = {"none": (), "q": (0.0,), "k": (None, 1.0), "both": (1.0, 1.0), "differing": (0.0, 1.0)}


@pairwise(
    groups=[1, 2, 4],
    window=[None, 1, 4, 100],
    causal=[True, False],
    softcap=[None, 0.3],
    rows=["plain", "packed", "left", "right", "prefix"],
    norms=NORMS,
    rope=[(6, False), (6, True), (4, False), (4, True), (0, False)],
    options=[{}, {"bias": True}, {"scale": 0.1}],
    fused=[False, True],
    sinks=[False, True],
    output_gate=[False, True],
)
def test_values_and_gradients(
    groups: int,
    window: int | None,
    causal: bool,
    softcap: float | None,
    rows: str,
    norms: str,
    rope: tuple[int, bool],
    options: dict[str, Any],
    fused: bool,
    sinks: bool,
    output_gate: bool,
) -> None:
    """Compare the output and all gradients in float32 with the formula in float64."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "causal": causal}
    given |= {"rotary_dim": rope[0], "interleaved_rope": rope[1], "sinks": sinks} | options
    given["output_gate"] = output_gate
    for i, (name, offset) in enumerate(zip(("q_norm", "k_norm"), NORMS[norms])):
        given[name] = None if offset is None else head_norm(offset, i)
    attention, norm = Attention(HIDDEN, 4, groups, HEAD_DIM, **given), RMSNorm(HIDDEN)
    if attention.sinks is not None:
        nn.init.normal_(attention.sinks)
    assert attention.scale == options.get("scale", HEAD_DIM**-0.5)

    sees = torch.ones(BATCH, SEQ, SEQ, dtype=torch.bool)
    positions, mask = PLAIN, None
    if causal:
        sees = sees.tril()
    if rows == "prefix":
        prefix = torch.tensor([5, 2])
        sees = sees | (torch.arange(SEQ) < prefix[:, None, None])
        mask = AttentionMask(SEQ, prefix_lengths=prefix)
    elif rows == "packed":
        positions, documents = PACKED, document_ids_from_positions(PACKED)
        sees = sees & (documents[:, :, None] == documents[:, None, :])
        mask = AttentionMask(SEQ, document_ids=documents)
    elif rows != "plain":
        padding = torch.ones(BATCH, SEQ, dtype=torch.int64)
        padding[0, slice(0, 4) if rows == "left" else slice(7, SEQ)] = 0
        sees = sees & padding.bool()[:, None, :]
        mask = AttentionMask(SEQ, padding_mask=padding)
    reach = window or SEQ
    sees = sees & torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1 - reach).tril(reach - 1)
    context = context_of(positions, mask, rope[0] or HEAD_DIM)

    x, upstream = torch.randn(2, BATCH, SEQ, HIDDEN)
    x.requires_grad_()
    seen = sees.any(-1, keepdim=True)
    if fused:
        out, total = attention(pre_norm(norm, x, x), context)
        assert torch.equal(total, 2 * x)
    else:
        out = attention(x, context)
    leaves = [x, *attention.parameters()]
    grads = torch.autograd.grad(out, leaves, upstream * seen)
    exact, wide = attention.double(), x.detach().double().requires_grad_()
    fed = normed(norm.double(), 2 * wide) if fused else wide
    expected = dense(exact, fed, context, sees)
    wanted = torch.autograd.grad(expected, [wide, *exact.parameters()], upstream.double() * seen)
    assert relative(out * seen, expected * seen) <= 1e-6
    for grad, want in zip(grads, wanted):
        if want.norm() > 1e-9:
            assert relative(grad, want) <= 1e-5
        else:  # if a query sees one key alone, its weight is 1 for any score
            assert grad.norm() < 1e-5


def test_a_cache_needs_causality() -> None:
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, causal=False)
    cache = KVCache(None, 1, 3, sliding_windows=[None])
    context = AttentionContext(*RotaryEmbedding(HEAD_DIM)(torch.arange(3)[None]), cache=cache)
    with pytest.raises(ValueError, match=r"causal=False .* without cache"):
        attention(torch.randn(1, 3, HIDDEN), context)


def test_a_cache_of_another_dtype_is_refused_except_under_autocast() -> None:
    attention, x = Attention(HIDDEN, 4, 2, HEAD_DIM), torch.randn(1, 3, HIDDEN)

    def context(dtype: torch.dtype | None) -> AttentionContext:
        cache = KVCache(None, 1, 3, dtype, sliding_windows=[None])
        return AttentionContext(*RotaryEmbedding(HEAD_DIM)(torch.arange(3)[None]), cache=cache)

    with pytest.raises(ValueError, match=r"holds torch\.bfloat16.* torch\.float32; make the cache"):
        attention(x, context(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(x, context(torch.float32)), attention(x, context(None)))


def test_numbers_that_no_attention_has_are_refused() -> None:
    counts = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
    wrong = {
        **dict.fromkeys(counts, (0, -2, 2.5, "4", True, torch.tensor(4))),
        **dict.fromkeys(("rotary_dim", "layer_index", "kv_from"), (-2, 2.5, "4", True)),
        **dict.fromkeys(("softcap", "scale"), (0, -1.0, "4", True, math.inf, math.nan)),
    }
    for name, values in wrong.items():
        for value in values:
            given = {"hidden_size": HIDDEN, "num_heads": 4, name: value}
            with pytest.raises(ValueError, match=rf"Attention: {name}[= ].*; expected an? "):
                Attention(**given)
    attention = Attention(HIDDEN, np.int64(4), sliding_window=np.int32(3), softcap=np.float32(2))
    kept = attention.num_heads, attention.sliding_window, attention.softcap
    assert kept == (4, 3, 2.0) and [*map(type, kept)] == [int, int, float]


def test_angles_of_another_size_are_refused() -> None:
    context = AttentionContext(*RotaryEmbedding(4)(PLAIN))
    with pytest.raises(
        ValueError, match=r"rotate 4 elements .* this layer rotates 6; make .*\(6\)"
    ):
        Attention(HIDDEN, 4, 2, HEAD_DIM)(torch.randn(1, SEQ, HIDDEN), context)
    for rotary_dim in (3, 8):
        with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim}; expected an even number"):
            Attention(HIDDEN, 4, 2, HEAD_DIM, rotary_dim=rotary_dim)


def test_a_changed_context_keeps_the_rest() -> None:
    tensor = torch.zeros(1, 1, 2)
    own = dict.fromkeys(("memory", "experts", "layer_input", "query_factors"), tensor)
    changed = AttentionContext(tensor, tensor, **own).changed(experts=None)
    assert changed.experts is None
    assert changed.query_factors is changed.memory is changed.layer_input is tensor
