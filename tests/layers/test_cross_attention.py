"""Compare attention to another sequence with a dense formula in float64, also when recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.layers import AttentionMask, CrossAttention, RMSNorm
from tests.layers.formulas import attended
from tests.models.pairs import relative

BATCH, SEQ, KEYS, HIDDEN, MEMORY, HEAD_DIM = 2, 5, 7, 24, 20, 6


def dense(layer: CrossAttention, x: Tensor, memory: Tensor, sees: Tensor) -> Tensor:
    """Compute the layer by its formula. sees (batch, keys) is False for padding."""
    q = layer.q_proj(x).unflatten(-1, (layer.num_heads, layer.head_dim))
    rows = layer.kv_proj(memory).unflatten(-1, (2 * layer.num_kv_heads, layer.head_dim))
    k, v = rows[:, :, : layer.num_kv_heads], rows[:, :, layer.num_kv_heads :]
    q = q if layer.q_norm is None else layer.q_norm(q)
    k = k if layer.k_norm is None else layer.k_norm(k)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = attended(q, k, v, sees[:, None, None], layer.scale, layer.softcap)
    return layer.o_proj(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "softcap": 0.5}, {"scale": 0.1, "norms": True}], ids=str
)
def test_values_and_gradients(options: dict[str, Any], padded: bool) -> None:
    torch.manual_seed(0)
    options = dict(options)
    if options.pop("norms", False):
        options |= {"q_norm": RMSNorm(HEAD_DIM), "k_norm": RMSNorm(HEAD_DIM)}
    layer = CrossAttention(HIDDEN, 4, 2, HEAD_DIM, memory_size=MEMORY, **options)
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    memory = torch.randn(BATCH, KEYS, MEMORY, requires_grad=True)
    sees = torch.ones(BATCH, KEYS, dtype=torch.bool)
    mask = None
    if padded:
        sees[0, 4:] = False
        mask = AttentionMask(SEQ, KEYS, padding_mask=sees)
    out = layer(x, memory, mask)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, [x, memory, *layer.parameters()], upstream)
    wide = [each.detach().double().requires_grad_() for each in (x, memory)]
    expected = dense(layer.double(), *wide, sees)
    wanted = torch.autograd.grad(expected, [*wide, *layer.parameters()], upstream.double())
    assert relative(out, expected) <= 1e-6
    for grad, want in zip(grads, wanted):
        assert relative(grad, want) <= 1e-5


def test_heads_that_do_not_fit_are_refused() -> None:
    for name in ("num_heads", "num_kv_heads", "head_dim", "memory_size", "softcap", "scale"):
        with pytest.raises(ValueError, match=rf"CrossAttention: {name}=0; expected an? "):
            CrossAttention(**{"hidden_size": 24, "num_heads": 4, name: 0})
    with pytest.raises(ValueError, match="24 is not a multiple of num_heads 5; set head_dim"):
        CrossAttention(24, 5)
    with pytest.raises(ValueError, match="4 is not a multiple of num_kv_heads 3"):
        CrossAttention(24, 4, 3)


def test_a_mask_may_be_a_tensor() -> None:
    layer = CrossAttention(HIDDEN, 4)
    x, memory = torch.randn(BATCH, SEQ, HIDDEN), torch.randn(BATCH, KEYS, HIDDEN)
    sees = torch.rand(BATCH, 1, SEQ, KEYS) < 0.5
    expected = layer(x, memory, AttentionMask(SEQ, KEYS, mask=sees))
    torch.testing.assert_close(layer(x, memory, sees), expected)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 7\)"):
        layer(x, memory, sees[:, 0, 0])


def test_a_memory_of_another_shape_is_refused() -> None:
    layer, x = CrossAttention(HIDDEN, 4, memory_size=MEMORY), torch.randn(BATCH, SEQ, HIDDEN)
    for shape in ((BATCH, KEYS, HIDDEN), (KEYS, MEMORY)):
        with pytest.raises(ValueError, match=r"expected \(batch, keys, 20\), or set memory_size"):
            layer(x, torch.randn(shape))
    with pytest.raises(ValueError, match=rf"memory has shape .*, but x has {BATCH} rows"):
        layer(x, torch.randn(BATCH + 1, KEYS, MEMORY))
