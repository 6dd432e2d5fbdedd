"""Attention with wide heads: values and gradients against the formula in float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from ligermodels.kernels import wide_attention as op
from ligermodels.kernels.launch import Launch, Launches
from ligermodels.kernels.wide_attention import wide_attention
from ligermodels.layers.attention_mask import AttentionMask
from tests.kernels.conftest import FLOAT16, INTERPRETING, Place, places
from tests.layers.formulas import attended
from tests.models.pairs import relative
from tests.pairwise import pairwise

PLACES = places(torch.float32, torch.float64, gpu=(torch.bfloat16, FLOAT16))


# The interpreter takes seconds for a case.
CASES = (
    {
        "rows": ["left", "packed"],
        "causal": [False, True],
        "window": [20, None],
        "past": [0],
        "head_dim": [264],
        "heads": [(2, 1)],
        "queries": [35],
        "panels": [True],
    }
    if INTERPRETING
    else {
        "rows": ["plain", "left", "packed", "unordered"],
        "causal": [False, True],
        "window": [None, 1, 45],
        "past": [0, 75],
        "head_dim": [264, 320, 512],
        "heads": [(4, 4), (4, 1), (6, 2)],
        "queries": [2, 70, 140],
        "panels": [False, True],
    }
)


@pairwise(
    lambda rows, past: past == 0 or rows in ("plain", "left"),
    lambda rows, causal: not INTERPRETING or (rows == "packed") == causal,
    lambda window, causal: not INTERPRETING or (window is None) == causal,
    indirect=["place"],
    place=PLACES,
    **CASES,
)
def test_values_and_gradients(
    place: Place,
    head_dim: int,
    heads: tuple[int, int],
    queries: int,
    past: int,
    window: int | None,
    causal: bool,
    rows: str,
    panels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `panels`, backward has room for the scores of the fewest queries at once."""
    if panels and importlib.util.find_spec("triton") is not None:
        import ligermodels.kernels.triton.wide_attention as launchers

        monkeypatch.setattr(launchers, "SCRATCH", 1)
    if INTERPRETING:  # takes seconds for a tile
        import ligermodels.kernels.triton.wide_attention as launchers

        small = Launch(32, 4, rows=32, depth=32)
        for name in ("SCORES", "SUMS"):
            monkeypatch.setattr(launchers, name, Launches(small, small))
        monkeypatch.setattr(launchers, "TILE", 32)
    draw, keys = torch.Generator().manual_seed(0), past + queries

    def make(count: int, length: int) -> Tensor:
        made = torch.randn(2, length, count, head_dim, generator=draw).to(*place)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = make(heads[0], queries), make(heads[1], keys), make(heads[1], keys)
    upstream, scale = make(heads[0], queries).detach(), 1.5 * head_dim**-0.5
    token, given = torch.arange(keys, device=place.device), {}
    if rows == "left":
        given["padding_mask"] = token >= torch.tensor([[keys // 3], [0]], device=place.device)
    elif rows != "plain":
        ids = torch.stack((token // 50, token // 31))
        given["document_ids"] = ids if rows == "packed" else ids % 2
    mask = AttentionMask(queries, keys, **given)
    ranges, ids = mask.key_ranges(window, 2, q.device, causal=causal)
    ranges = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in ranges)  # any strides
    ids = None if ids is None else tuple(x.repeat_interleave(2, -1)[..., ::2] for x in ids)
    out = wide_attention(q, k, v, ranges, ids, scale=scale)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attended(*wide, mask.dense(window, q.device, causal=causal), scale)
    bound = {torch.float64: 1e-13, torch.float32: 2e-6, FLOAT16: 2e-3}.get(place.dtype, 1e-2)
    assert relative(out, expected) <= bound
    for grad, want in zip(grads, torch.autograd.grad(expected, wide, upstream.double())):
        if want.norm() > 1e-9:
            assert relative(grad, want) <= bound
        else:  # in a window of one, the only weight is 1 for any score
            assert grad.norm() <= bound * upstream.norm()


def test_a_batch_of_more_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and heads than a grid takes are computed in parts."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, n, 7, 264, generator=draw).requires_grad_() for n in (4, 2, 2))
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2]]).repeat(5, 1)
    for given in ({}, {"document_ids": ids}):
        mask = AttentionMask(7, 7, **given)
        ranges = mask.key_ranges(None, 5, q.device, causal=True)
        both = []
        for most in (op.MOST_PROGRAMS, 9):
            monkeypatch.setattr(op, "MOST_PROGRAMS", most)
            out = op.wide_attention(q, k, v, *ranges, scale=0.1)
            both.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for found, expected in zip(*both):
            torch.testing.assert_close(found, expected)


def test_refusals() -> None:
    q, k = torch.zeros(2, 4, 3, 320), torch.zeros(2, 2, 5, 320)
    ranges, ids = AttentionMask(3, 5).key_ranges(None, 2, q.device)
    wide = tuple(x.repeat(1, 1, 1, 2) for x in (q, k, k))
    for given in (q[:, :3], k, k), (q, k.double(), k.double()), wide:
        with pytest.raises(ValueError, match=r"expected \(batch, heads, queries.* heads of 512"):
            wide_attention(*given, ranges, ids, scale=1.0)
