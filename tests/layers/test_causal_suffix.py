"""Attention of the last tokens of rows, against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers.attention_backend import causal_suffix
from tests.layers.formulas import attended


def check(device: str, dtype: torch.dtype, limit: float, size: int = 16, head_dim: int = 8) -> None:
    generator = torch.Generator().manual_seed(0)

    def make(heads: int, tokens: int) -> torch.Tensor:
        x = torch.randn(2, tokens, heads, head_dim, generator=generator).to(device, dtype)
        return x.transpose(1, 2).requires_grad_()

    keys = 3 * size
    q, k, v = make(4, size), make(2, keys), make(2, keys)
    upstream = torch.randn(2, 4, size, head_dim, generator=generator).to(device, dtype)
    visible = torch.ones(size, keys, dtype=torch.bool, device=device).tril(keys - size)
    out = causal_suffix(q, k, v, 0.3)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attended(*exact, visible, 0.3)
    ours = torch.autograd.grad(out, (q, k, v), upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for mine, true in zip((out, *ours), (expected, *theirs)):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= limit * true.norm()


@pytest.mark.parametrize("size", [1, 16])
def test_equals_the_formula(size: int) -> None:
    check("cpu", torch.float32, 1e-6, size)


@pytest.mark.gpu
def test_equals_the_formula_on_a_gpu() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is preferred from Hopper on")
    check("cuda", torch.bfloat16, 8e-3, 128, 128)
