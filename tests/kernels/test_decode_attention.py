"""Attention of few tokens to a cache: values, and what is written, beside a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from ligermodels.kernels.decode_attention import decode_attention
from tests.pairwise import pairwise


def expected_of(q, keys, values, first, sinks, window, softcap, scale):
    """Return the attention of a row's last token, in float64: q (heads, d), keys (kv, n, d)."""
    end, group = keys.shape[1], len(q) // len(keys)
    lowest = max(first, 0 if window is None else end - window)
    keys, values = (x.double().repeat_interleave(group, 0)[:, lowest:] for x in (keys, values))
    scores = (keys @ q.double()[:, :, None])[..., 0] * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), -1)
    return (scores.softmax(-1)[:, None, : values.shape[1]] @ values)[:, 0]


@pairwise(
    lambda queries, tokens: queries <= min(tokens[0]),
    queries=[1, 3, 11],
    head_dim=[8, 64, 80, 256, 320, 512],
    heads=[(8, 2), (4, 4), (6, 1)],
    # how many tokens each row has, and the slots of the cache
    tokens=[((1, 1), 1), ((3, 40), 40), ((70, 150), 200), ((90, 33), 32)],
    window=[None, 20],
    softcap=[None, 5.0],
    padded=[False, True],
    has_new=[True, False],
    has_sinks=[False, True],
)
def test_values(
    place, queries, head_dim, heads, tokens, window, softcap, padded, has_new, has_sinks
) -> None:
    """The cache has more slots than the row tokens, or is a ring that holds the last ones."""
    (ends, slots), (num_heads, kv_heads), longest = tokens, heads, max(tokens[0])
    draw = torch.Generator().manual_seed(0)
    shape = (2, kv_heads, longest, head_dim)
    keys, values = (torch.randn(shape, generator=draw).to(place.dtype) for _ in range(2))
    q = torch.randn(2, num_heads, queries, head_dim, generator=draw).to(place.dtype)
    sinks = torch.randn(num_heads, generator=draw).to(place.dtype) if has_sinks else None
    firsts = [min(2, end - queries) for end in ends] if padded else [0, 0]
    if any(end > slots for end in ends):  # a ring has the tokens of the window alone
        window, firsts = min(window or slots, slots - queries + 1), [0, 0]
    scale = 1 / math.sqrt(head_dim)
    # What no token was written to may hold anything.
    cache = [torch.full((2, kv_heads, slots, head_dim), torch.nan, dtype=place.dtype) for _ in "kv"]
    for row, end in enumerate(ends):
        for at in range(end - has_new * queries):
            for held, x in zip(cache, (keys, values)):
                held[row, :, at % slots] = x[row, :, at]
    new = [
        torch.stack([x[row, :, end - queries : end] for row, end in enumerate(ends)])
        for x in (keys, values)
    ]
    k, v = (x.to(place.device) for x in cache)
    # Strides as those of a part of packed queries, keys and values.
    given = tuple(x.to(place.device).transpose(1, 2).contiguous().transpose(1, 2) for x in new)
    found = decode_attention(
        q.to(place.device),
        given if has_new else None,
        k,
        v,
        torch.tensor([*zip(ends, firsts)], device=place.device)[:, 0],
        torch.tensor([*zip(ends, firsts)], device=place.device)[:, 1] if padded else None,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.to(place.device),
    )
    bound = {torch.float32: 2e-6, torch.float64: 1e-12}.get(place.dtype, 1e-2)
    for row, end in enumerate(ends):
        for query in range(queries):
            at = end - queries + query
            seen, options = [x[row, :, : at + 1] for x in (keys, values)], (window, softcap, scale)
            expected = expected_of(q[row, :, query], *seen, firsts[row], sinks, *options)
            error = (found[row, :, query].cpu().double() - expected).norm() / expected.norm()
            assert error < bound
            for held, x in ((k, keys), (v, values)):
                assert torch.equal(held[row, :, at % slots].cpu(), x[row, :, at])


def test_refusals() -> None:
    q, k = torch.zeros(2, 4, 1, 8), torch.zeros(2, 2, 5, 8)
    ends = torch.ones(2, dtype=torch.int64)
    wrong = {
        "expected \\(batch, heads, queries": (q[:, :3], None, k, k, ends),
        "no more queries than slots": (q.expand(2, 4, 6, 8), None, k, k, ends),
        "new_k \\(2, 2, 5, 8\\)": (q, (k, k), k, k, ends),
        "of one dtype": (q, None, k.double(), k.double(), ends),
        "ends \\(1,\\)": (q, None, k, k, ends[:1]),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            decode_attention(*given, scale=1.0)
