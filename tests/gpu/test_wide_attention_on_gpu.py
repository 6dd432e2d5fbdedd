"""Attention with heads of 512 at the lengths of Gemma 4, with documents, windows and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.layers.attention_backend import attend, choose_backend
from ligermodels.layers.attention_mask import AttentionMask
from tests.models.pairs import relative

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 512
ROWS = 512  # queries whose scores float64 holds at once


@torch.no_grad()
def exact(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, see: Any) -> list[Tensor]:
    """Return the output and the gradients of q, k and v in float64, ROWS queries at a time.

    Args: see: the dense mask (batch or 1, queries, keys) of queries `start` to `stop` and the keys
        before `stop`.
    """
    batch, _, seq, _ = q.shape
    shape = batch, KV_HEADS, -1, seq, HEAD_DIM
    q, upstream = q.double().view(shape), upstream.double().view(shape)
    k, v = (x.double().unsqueeze(2) for x in (k, v))
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), *map(torch.zeros_like, (k, v))
    for start in range(0, seq, ROWS):
        stop = min(start + ROWS, seq)
        mine, seen = (..., slice(start, stop), slice(None)), (..., slice(0, stop), slice(None))
        for head in range(KV_HEADS):
            one = slice(head, head + 1)
            scores = q[:, one][mine] @ k[:, one][seen].mT
            hidden = ~see(start, stop)[:, None, None]
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).nan_to_num_()
            out[:, one][mine] = weights @ v[:, one][seen]
            grad = upstream[:, one][mine]
            slopes = grad @ v[:, one][seen].mT
            slopes -= (grad * out[:, one][mine]).sum(-1, keepdim=True)
            slopes *= weights
            dq[:, one][mine] = slopes @ k[:, one][seen]
            dk[:, one][seen] += (slopes.mT @ q[:, one][mine]).sum(2, keepdim=True)
            dv[:, one][seen] += (weights.mT @ grad).sum(2, keepdim=True)
    return [out.flatten(1, 2), dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2)]


@pytest.mark.parametrize(
    ("batch", "seq", "kind", "window"),
    [
        (1, 8192, "plain", None),
        (1, 8192, "packed", None),
        (1, 8192, "packed", 1024),
        (2, 2049, "left padding", None),
        (1, 32768, "packed", None),
        (1, 32768, "plain", 4096),
    ],
)
def test_float64_and_compiled(batch: int, seq: int, kind: str, window: int | None) -> None:
    draw = torch.Generator("cuda").manual_seed(0)

    def make(heads: int) -> Tensor:
        shape = batch, seq, heads, HEAD_DIM
        x = torch.randn(shape, generator=draw, device="cuda").to(torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()

    q, k, v, upstream = make(HEADS), make(KV_HEADS), make(KV_HEADS), make(HEADS).detach()
    with torch.no_grad():
        q *= HEAD_DIM**-0.5  # Gemma 4 norms q and k, and has no scale
    token = torch.arange(seq, device="cuda")
    # Documents of unequal lengths, of which some end inside of a tile.
    ids = (token.sqrt() / 11).long()[None]
    padding = token >= torch.tensor([[seq // 3], [0]], device="cuda")
    given = {"document_ids": ids} if kind == "packed" else {}
    given |= {"padding_mask": padding[:batch]} if kind == "left padding" else {}
    mask = AttentionMask(seq, **given)
    options: Any = q.device, q.dtype, HEAD_DIM, batch * HEADS
    assert choose_backend(mask, window, None, *options) == "wide"

    def step(attention: Any) -> list[Tensor]:
        out = attention(q, k, v, mask, scale=1.0, window=window)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    def see(start: int, stop: int) -> Tensor:
        query, key = token[start:stop, None], token[None, :stop]
        seen = ((key <= query) & (query - key < (window or seq)))[None]
        if kind == "packed":
            seen = seen & (ids[:, start:stop, None] == ids[:, None, :stop])
        return seen & padding[:batch, None, :stop] if kind == "left padding" else seen

    found = step(attend)
    for name, ours, want in zip("oqkv", found, exact(q, k, v, upstream, see)):
        assert relative(ours, want) <= 6e-3, name
    if seq <= 8192:
        torch._dynamo.reset()  # PyTorch 2.11 fails at lengths that change
        for ours, again in zip(found, step(torch.compile(attend, fullgraph=True))):
            torch.testing.assert_close(ours, again, rtol=0, atol=0)
