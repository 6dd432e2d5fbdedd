"""Attention by the kernels of scaled_dot_product_attention, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers.attention_backend import raw_attention
from tests.layers.formulas import attended

pytestmark = pytest.mark.gpu


def check(dtype: torch.dtype, limit: float, past: int, head_dim: int, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def make(heads: int, tokens: int) -> torch.Tensor:
        x = torch.randn(2, tokens, heads, head_dim, generator=generator).to("cuda", dtype)
        return x.transpose(1, 2).requires_grad_()

    size, keys = 128, 128 + past
    q, k, v = make(4, size), make(2, keys), make(2, keys)
    upstream = torch.randn(2, 4, size, head_dim, generator=generator).to("cuda", dtype)
    visible = torch.ones(size, keys, dtype=torch.bool, device="cuda").tril(past)
    given = [q, k, v]
    if has_sinks:
        given.append(torch.tensor([-4.0, 0.5, 9.0, 1.0], device="cuda", dtype=dtype))
        given[3].requires_grad_()
    out = raw_attention(q, k, v, *(given[3:] or [None]), 0.3)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = attended(*exact[:3], visible, 0.3, sinks=exact[3] if has_sinks else None)
    ours = torch.autograd.grad(out, given, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for mine, true in zip((out, *ours), (expected, *theirs)):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= limit * true.norm()


def test_equals_the_formula() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is preferred from Hopper on")
    for past, has_sinks in ((256, False), (256, True), (0, True)):
        check(torch.bfloat16, 8e-3, past, 128, has_sinks)
        check(torch.float16, 2e-3, past, 64, has_sinks)
