"""Attention by the kernels of scaled_dot_product_attention, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers.attention_backend import raw_attention
from tests.layers.formulas import attended


def check(
    device: str,
    dtype: torch.dtype,
    limit: float,
    size: int = 16,
    past: int = 0,
    head_dim: int = 8,
    causal: bool = True,
    has_sinks: bool = False,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def make(heads: int, tokens: int) -> torch.Tensor:
        x = torch.randn(2, tokens, heads, head_dim, generator=generator).to(device, dtype)
        return x.transpose(1, 2).requires_grad_()

    keys = size + past
    q, k, v = make(4, size), make(2, keys), make(2, keys)
    upstream = torch.randn(2, 4, size, head_dim, generator=generator).to(device, dtype)
    visible = torch.ones(size, keys, dtype=torch.bool, device=device)
    visible = visible.tril(past) if causal else visible
    given = [q, k, v]
    if has_sinks:
        given.append(torch.tensor([-4.0, 0.5, 9.0, 1.0], device=device, dtype=dtype))
        given[3].requires_grad_()
    out = raw_attention(q, k, v, *(given[3:] or [None]), 0.3, causal)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = attended(*exact[:3], visible, 0.3, sinks=exact[3] if has_sinks else None)
    ours = torch.autograd.grad(out, given, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for mine, true in zip((out, *ours), (expected, *theirs)):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= limit * true.norm()


# dtype, bound, queries, keys before them
CASES = [
    (torch.float32, 1e-6, 16, 32),
    (torch.float32, 1e-6, 1, 2),
    (torch.float32, 1e-6, 16, 0),
    (torch.float64, 1e-14, 16, 32),
    (torch.bfloat16, 1e-2, 16, 0),
    (torch.float16, 2e-3, 16, 0),
]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula(case: tuple[torch.dtype, float, int, int], has_sinks: bool) -> None:
    check("cpu", *case, has_sinks=has_sinks)


def test_without_causality() -> None:
    check("cpu", torch.float32, 1e-6, 16, 5, causal=False, has_sinks=True)


@pytest.mark.gpu
def test_equals_the_formula_on_a_gpu() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is preferred from Hopper on")
    for past, has_sinks in ((256, False), (256, True), (0, True)):
        check("cuda", torch.bfloat16, 8e-3, 128, past, 128, has_sinks=has_sinks)
        check("cuda", torch.float16, 2e-3, 128, past, 64, has_sinks=has_sinks)
