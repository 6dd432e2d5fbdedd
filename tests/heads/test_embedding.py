"""Embedding models: pooling, padding on either side, and lengths."""

from __future__ import annotations

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.heads.embedding import EmbeddingModel, pool
from tests.tiny_models import VOCAB, random_model


def test_pooling() -> None:
    hidden = torch.randn(3, 4, 5, dtype=torch.bfloat16)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    last = pool(hidden, mask, "last")
    assert last.dtype == torch.float32
    chosen = torch.stack([hidden[0, 1], hidden[1, 3], hidden[2, 0]])
    torch.testing.assert_close(last, chosen.float())
    mean = pool(hidden.float(), mask, "mean")
    expected = torch.stack([hidden[0, :2].float().mean(0), hidden[1, 1:].float().mean(0)])
    torch.testing.assert_close(mean[:2], expected)
    assert mean[2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_is_not_rounded(dtype: torch.dtype) -> None:
    """Neither its sum nor its divisor; the gradient is rounded once. A sum may pass float16."""
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.rand(2, 301, 5, generator=draw) * 1000).to(dtype).requires_grad_()
    mask = torch.ones(2, 301, dtype=torch.int64)
    mask[0, 77:] = 0
    mean = pool(hidden, mask, "mean")
    assert mean.dtype == torch.float32
    expected = torch.stack([hidden[0, :77].double().mean(0), hidden[1].double().mean(0)])
    # A float32 sum of 301 terms of one sign and a division, in any order.
    torch.testing.assert_close(mean.double(), expected, rtol=302 * 2**-24, atol=0)
    mean.sum().backward()
    assert hidden.grad is not None
    shares = (mask / mask.sum(1, keepdim=True)).to(dtype)[..., None].expand_as(hidden)
    assert torch.equal(hidden.grad, shares)


def test_a_vector_does_not_depend_on_the_padding() -> None:
    ids = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    padding = torch.zeros(2, 3, dtype=torch.int64)
    for pooling in ("mean", "last"):
        model = EmbeddingModel(random_model("llama"), pooling)
        bare = model(ids)
        torch.testing.assert_close(bare.norm(dim=-1), torch.ones(2))
        for padded in (torch.cat([ids, padding], 1), torch.cat([padding, ids], 1)):
            mask = torch.cat([torch.ones_like(ids), padding], 1)
            mask = mask if padded[0, 0] == ids[0, 0] else mask.flip(1)
            torch.testing.assert_close(model(padded, mask), bare, rtol=1e-4, atol=1e-5)
    long = EmbeddingModel(random_model("llama"), "mean", normalize=False)(ids)
    assert (long.norm(dim=-1) - 1).abs().min() > 1e-3


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="pooling: 'cls' is not one of mean, last"):
        EmbeddingModel(random_model("llama"), "cls")
