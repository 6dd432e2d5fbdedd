"""Attention sinks: against transformers' gpt-oss, under recomputation, compiled, with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligermodels.layers import (
    Attention,
    AttentionContext,
    RotaryEmbedding,
)
from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask
from tests.models.pairs import relative

HIDDEN, HEADS, GROUPS, SEQ = 48, 8, 2, 21


def make(window: int | None = None, **options: Any) -> Attention:
    torch.manual_seed(0)
    attention = Attention(
        HIDDEN, HEADS, GROUPS, 8, bias=True, sinks=True, sliding_window=window, **options
    )
    assert attention.sinks is not None
    nn.init.normal_(attention.sinks)
    return attention


def context_of(mask: AttentionMask | None = None) -> AttentionContext:
    return AttentionContext(*RotaryEmbedding(8)(torch.arange(SEQ)[None]), mask)


def test_compiled_gradients_under_autocast_are_those_of_eager_mode() -> None:
    mask = AttentionMask(SEQ)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, mask, scale=0.3, window=5, sinks=sinks)

    leaves = [torch.randn(1, n, SEQ, 8, requires_grad=True) for n in (HEADS, GROUPS, GROUPS)]
    leaves, found = [*leaves, torch.randn(HEADS, requires_grad=True)], []
    for each in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            out = each(*leaves)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
def test_equals_transformers(window: int | None, dtype: torch.dtype) -> None:
    """A 16-bit output is no farther from float32 than theirs, in the mean over 8 inputs."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = gpt_oss.GptOssConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=8,
        layer_types=["full_attention"],
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    ours, theirs = make(window), gpt_oss.GptOssAttention(config, 0)
    with torch.no_grad():
        parts = (HEADS * 8, GROUPS * 8, GROUPS * 8)
        for name in ("weight", "bias"):
            packed = getattr(ours.qkv_proj, name).split(parts)
            for part, x in zip("qkv", packed):
                getattr(getattr(theirs, f"{part}_proj"), name).copy_(x)
            getattr(theirs.o_proj, name).copy_(getattr(ours.o_proj, name))
        theirs.sinks.copy_(ours.sinks)
    context = context_of()
    hides = ~AttentionMask(SEQ).dense(window, torch.device("cpu"))
    angles = context.cos, context.sin

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(hides.shape, dtype=x.dtype).masked_fill(hides, torch.finfo(x.dtype).min)
        expected, _ = theirs(x, tuple(each.to(x.dtype) for each in angles), mask)
        return ours(x, context), expected

    inputs = torch.randn(8, 2, SEQ, HIDDEN)
    exact = [run(x) for x in inputs]
    assert all(relative(*pair) <= 1e-6 for pair in exact)
    for model in (ours, theirs):
        (
            model(inputs[0], context) if model is ours else run(inputs[0])[1]
        ).square().sum().backward()
    for name in ("sinks", "o_proj.weight"):
        ours_grad, theirs_grad = (m.get_parameter(name).grad for m in (ours, theirs))
        assert relative(ours_grad, theirs_grad) <= 1e-5
    grads = [getattr(theirs, f"{part}_proj").weight.grad for part in "qkv"]
    assert relative(ours.qkv_proj.weight.grad, torch.cat(grads)) <= 1e-5
    if dtype != torch.float32:
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        ratios = []
        for x, (true, _) in zip(inputs, exact):
            mine, other = run(x.to(dtype))
            ratios.append(relative(mine, true) / relative(other, true))
        assert torch.tensor(ratios).log().mean().exp() <= 1.05
