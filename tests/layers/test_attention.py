"""Compare attention with a dense formula in float64: grouped heads, masks, packing, wrappers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ligermodels.layers import Attention, AttentionContext, RMSNorm, RotaryEmbedding, pre_norm
from ligermodels.layers.attention_mask import (
    AttentionMask,
    document_ids_from_positions,
    positions_from_cu_seqlens,
)
from tests.models.pairs import relative
from tests.pairwise import pairwise

HIDDEN, SEQ, BATCH, HEAD_DIM = 24, 11, 2, 6


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of x (batch, seq, heads, head_dim) as complex pairs."""
    pairs = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin).unsqueeze(-2)
    return torch.cat([pairs.real, pairs.imag], -1)


def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    assert isinstance(norm, RMSNorm)
    return (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight + norm.offset)
    )


def dense(attention: Attention, x: Tensor, context: AttentionContext, sees: Tensor) -> Tensor:
    """Compute attention head by head. sees (batch, seq, seq) is True if a query sees a key."""
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = attention.qkv_proj(x).unflatten(-1, (heads + 2 * groups, size))
    q, k, v = qkv.split([heads, groups, groups], -2)
    cos, sin = context.cos.to(x.dtype), context.sin.to(x.dtype)
    q, k = normed(attention.q_norm, q), normed(attention.k_norm, k)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    out = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = q[:, :, head] @ k[:, :, group].transpose(-1, -2) * attention.scale
        if attention.softcap is not None:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1).nan_to_num()
        out.append(weights @ v[:, :, group])
    return attention.o_proj(torch.cat(out, -1))


def causal(seq: int = SEQ) -> Tensor:
    return torch.ones(seq, seq, dtype=torch.bool).tril()


def context_of(positions: Tensor, mask: Any = None) -> AttentionContext:
    return AttentionContext(*RotaryEmbedding(HEAD_DIM)(positions), mask)


def compare(attention: Attention, context: AttentionContext, sees: Tensor) -> None:
    """Compare the output and all gradients in float32 with the formula in float64."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    upstream = torch.randn(BATCH, SEQ, HIDDEN)
    rows = sees.any(-1, keepdim=True).expand(BATCH, SEQ, 1)
    upstream = upstream * rows
    out = attention(x, context)
    leaves = [x, *attention.parameters()]
    grads = torch.autograd.grad(out, leaves, upstream)
    exact = attention.double()
    x64 = x.detach().double().requires_grad_()
    expected = dense(exact, x64, context, sees)
    wanted = torch.autograd.grad(expected, [x64, *exact.parameters()], upstream.double())
    assert relative(out * rows, expected * rows) <= 1e-6
    for grad, want in zip(grads, wanted):
        assert relative(grad, want) <= 1e-5


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"scale": 0.1}])
def test_causal(groups: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = Attention(HIDDEN, 4, groups, HEAD_DIM, **options)
    assert attention.scale == options.get("scale", HEAD_DIM**-0.5)
    compare(attention, context_of(torch.arange(SEQ)[None]), causal().expand(BATCH, -1, -1))


@pairwise(window=[1, 4, SEQ, 100], softcap=[None, 0.3], packed=[False, True])
def test_windows_and_soft_caps(window: int, softcap: float | None, packed: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, sliding_window=window, softcap=softcap)
    sees = causal().triu(1 - window).expand(BATCH, -1, -1)
    mask, positions = None, torch.arange(SEQ)[None]
    if packed:
        positions = positions % 6
        documents = document_ids_from_positions(positions)
        sees = sees & (documents[:, :, None] == documents[:, None, :])
        mask = AttentionMask(SEQ, document_ids=documents)
    compare(attention, context_of(positions, mask), sees)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.3}], ids=str)
def test_both_directions(window: int | None, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, causal=False, sliding_window=window, **options)
    reach = window or SEQ
    sees = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1 - reach).tril(reach - 1)
    context = context_of(torch.arange(SEQ)[None])
    compare(attention, context, sees.expand(BATCH, -1, -1))


def test_a_prefix() -> None:
    torch.manual_seed(0)
    prefix = torch.tensor([5, 2])
    sees = causal() | (torch.arange(SEQ) < prefix[:, None, None])
    context = context_of(torch.arange(SEQ)[None], AttentionMask(SEQ, prefix_lengths=prefix))
    compare(Attention(HIDDEN, 4, 2, HEAD_DIM), context, sees)


def test_a_cache_needs_causality() -> None:
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, causal=False)
    context = AttentionContext(
        *RotaryEmbedding(HEAD_DIM)(torch.arange(3)[None]), cache=GrowingCache()
    )
    with pytest.raises(ValueError, match=r"causal=False .* without cache"):
        attention(torch.randn(1, 3, HIDDEN), context)


def head_norm(offset: float, seed: int) -> RMSNorm:
    norm = RMSNorm(HEAD_DIM, offset=offset, casting_mode="gemma" if offset else "llama")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        norm.weight += torch.randn(HEAD_DIM, generator=generator) * 0.3
    return norm


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("parts", ["both", "q", "k", "differing"])
def test_norms_of_heads(offset: float, parts: str) -> None:
    torch.manual_seed(0)
    q_norm = None if parts == "k" else head_norm(offset, 1)
    k_norm = None if parts == "q" else head_norm(1 - offset if parts == "differing" else offset, 2)
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, q_norm=q_norm, k_norm=k_norm)
    compare(attention, context_of(torch.arange(SEQ)[None]), causal().expand(BATCH, -1, -1))


def test_biases_apart() -> None:
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, bias=True, out_bias=False)
    assert attention.qkv_proj.bias is not None and attention.o_proj.bias is None
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, bias=True)
    assert attention.o_proj.bias is not None


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
            with pytest.raises(ValueError, match=rf"Attention: {name}=.*; expected an? "):
                Attention(**given)
    with pytest.raises(
        ValueError, match="rotary_dim=3; expected an even number from 0 to head_dim"
    ):
        Attention(HIDDEN, 4, rotary_dim=3)
    attention = Attention(HIDDEN, np.int64(4), sliding_window=np.int32(3), softcap=np.float32(2))
    kept = attention.num_heads, attention.sliding_window, attention.softcap
    assert kept == (4, 3, 2.0) and [*map(type, kept)] == [int, int, float]


def test_head_dim_defaults_to_an_even_share() -> None:
    attention = Attention(24, 4)
    assert attention.head_dim == 6
    assert attention.qkv_proj.weight.shape == (72, 24)
    with pytest.raises(ValueError, match="4 is not a multiple of num_kv_heads 3"):
        Attention(24, 4, 3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    torch.manual_seed(0)
    padding = torch.ones(BATCH, SEQ, dtype=torch.int64)
    padding[0, slice(0, 4) if side == "left" else slice(7, SEQ)] = 0
    sees = causal() & padding.bool()[:, None, :]
    mask = AttentionMask(SEQ, padding_mask=padding)
    context = context_of(torch.arange(SEQ)[None], mask)
    compare(Attention(HIDDEN, 4, 2, HEAD_DIM), context, sees)


def test_packed_documents() -> None:
    torch.manual_seed(0)
    positions = torch.tensor(
        [[0, 1, 2, 3, 0, 1, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    )
    documents = document_ids_from_positions(positions)
    assert documents.tolist() == [[0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [0] * 11]
    sees = causal() & (documents[:, :, None] == documents[:, None, :])
    mask = AttentionMask(SEQ, document_ids=documents)
    compare(Attention(HIDDEN, 4, 2, HEAD_DIM), context_of(positions, mask), sees)


def test_packed_documents_equal_separate_runs() -> None:
    torch.manual_seed(0)
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM)
    cu_seqlens = torch.tensor([0, 4, 4, 5, 11])  # the second document is empty
    positions = positions_from_cu_seqlens(cu_seqlens, 1, 11)
    assert positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]]
    x = torch.randn(1, 11, HIDDEN)
    packed = attention(
        x,
        context_of(
            positions, AttentionMask(11, document_ids=document_ids_from_positions(positions))
        ),
    )
    for start, end in ((0, 4), (4, 5), (5, 11)):
        alone = attention(x[:, start:end], context_of(torch.arange(end - start)[None]))
        assert relative(packed[:, start:end], alone) <= 1e-6


def test_a_fused_norm_equals_the_parts() -> None:
    torch.manual_seed(0)
    attention, norm = Attention(HIDDEN, 4, 2, HEAD_DIM), RMSNorm(HIDDEN)
    x, residual = torch.randn(2, BATCH, SEQ, HIDDEN)
    context = context_of(torch.arange(SEQ)[None])
    out, total = attention(pre_norm(norm, x, residual), context)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out, attention(norm(x + residual), context))
    out, total = attention(pre_norm(norm, x), context)
    assert torch.equal(total, x) and total.data_ptr() == x.data_ptr()
    torch.testing.assert_close(out, attention(norm(x), context))


class GrowingCache:
    """A cache that has only the methods that attention needs."""

    def __init__(self) -> None:
        self.length = 0
        self.kept: list[Tensor] = []

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert layer_index == 3
        self.kept = [
            torch.cat([old, new], 2) for old, new in zip(self.kept or (k[:, :, :0],) * 2, (k, v))
        ]
        return self.kept[0], self.kept[1]

    def key_positions(self, layer_index: int, new: int) -> None:
        return None

    def advance(self, count: int) -> None:
        self.length += count


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"sliding_window": 3, "softcap": 0.5}]
)
def test_cache(options: dict[str, Any]) -> None:
    """A prompt, then several tokens, then one token equal one run over all of them."""
    torch.manual_seed(0)
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, layer_index=3, **options)
    x = torch.randn(BATCH, SEQ, HIDDEN)
    everything = attention(x, context_of(torch.arange(SEQ)[None]))
    cache, outputs = GrowingCache(), []
    for start, end in ((0, 6), (6, 10), (10, 11)):
        angles = RotaryEmbedding(HEAD_DIM)(torch.arange(start, end)[None])
        context = AttentionContext(*angles, cache=cache)
        outputs.append(attention(x[:, start:end], context))
        cache.advance(end - start)
    assert relative(torch.cat(outputs, 1), everything) <= 1e-6


def test_bfloat16_error_is_no_worse_than_the_parts() -> None:
    torch.manual_seed(0)
    attention, norm = Attention(HIDDEN, 4, 2, HEAD_DIM), RMSNorm(HIDDEN)
    x = torch.randn(BATCH, SEQ, HIDDEN)
    context = context_of(torch.arange(SEQ)[None])
    exact = dense(
        attention.double(),
        nn.functional.rms_norm(x.double(), (HIDDEN,), eps=norm.eps),
        context,
        causal().expand(BATCH, -1, -1),
    )
    attention, norm, low = attention.to(torch.bfloat16), norm.to(torch.bfloat16), x.bfloat16()
    fused, _ = attention(pre_norm(norm, low), context)
    parts = attention(norm(low), context)
    assert relative(fused, exact) <= 1.1 * relative(parts, exact)


def rotated_part(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of each head of x (batch, seq, heads, head_dim)."""
    first, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    if not interleaved:
        return torch.cat((rotated(first, cos, sin), rest), -1)
    pairs = torch.view_as_complex(first.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.complex(cos, sin).unsqueeze(-2)
    return torch.cat((torch.view_as_real(turned).flatten(-2), rest), -1)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved"), [(0, False), (4, False), (4, True), (6, True)]
)
def test_a_part_of_each_head_is_rotated(rotary_dim: int, interleaved: bool, norms: bool) -> None:
    torch.manual_seed(0)
    q_norm, k_norm = (RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)) if norms else (None, None)
    options: Any = {"rotary_dim": rotary_dim, "interleaved_rope": interleaved}
    attention = Attention(HIDDEN, 4, 2, HEAD_DIM, q_norm=q_norm, k_norm=k_norm, **options).double()
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    cos, sin = RotaryEmbedding(rotary_dim or HEAD_DIM)(torch.arange(SEQ)[None])
    cos, sin = cos.double(), sin.double()
    qkv = attention.qkv_proj(x).unflatten(-1, (8, HEAD_DIM))
    q, k, v = qkv.split((4, 2, 2), -2)
    q, k = normed(q_norm, q), normed(k_norm, k)
    if rotary_dim:
        q, k = (rotated_part(part, cos, sin, interleaved) for part in (q, k))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = attention.o_proj(out.transpose(1, 2).flatten(-2))
    context = AttentionContext(cos, sin)
    torch.testing.assert_close(attention(x, context), expected)
    norm = RMSNorm(HIDDEN).double()
    fused, total = attention(pre_norm(norm, x, x), context)
    torch.testing.assert_close(fused, attention(norm(2 * x), context))
    assert torch.equal(total, 2 * x)


def test_angles_of_another_size_are_refused() -> None:
    context = AttentionContext(*RotaryEmbedding(4)(torch.arange(SEQ)[None]))
    with pytest.raises(
        ValueError, match=r"rotate 4 elements .* this layer rotates 6; make .*\(6\)"
    ):
        Attention(HIDDEN, 4, 2, HEAD_DIM)(torch.randn(1, SEQ, HIDDEN), context)
    for rotary_dim in (3, 8):
        with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim}; expected an even number"):
            Attention(HIDDEN, 4, 2, HEAD_DIM, rotary_dim=rotary_dim)


def test_a_context_keeps_one_copy_for_each_device() -> None:
    """The meta device stands for a second GPU."""
    memory = torch.zeros(1, 3, 8)
    context = AttentionContext(
        *RotaryEmbedding(HEAD_DIM)(torch.arange(SEQ)[None]),
        causal()[None, None],
        memory=memory,
        memory_mask=AttentionMask(SEQ, 3),
    )
    there = context.to("meta")
    assert there is context.to("meta") and there is there.to("meta")
    assert context is context.to("cpu")
    parts = (there.cos, there.sin, there.mask.mask, there.memory)
    assert all(part is not None and part.is_meta for part in parts)
    assert there.memory_mask is not None and there.memory_mask.keys == 3
