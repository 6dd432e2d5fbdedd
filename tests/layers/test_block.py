"""Tests of the decoder block: its formula, the tensors it saves for backward, replaced modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ligermodels.layers import (
    Attention,
    AttentionContext,
    DecoderBlock,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    SandwichBlock,
)
from tests.models.pairs import randomize, relative

HIDDEN, HEADS, GROUPS, HEAD_DIM, INNER = 32, 4, 2, 16, 56
BATCH, SEQ = 2, 12


def make(bias: bool = False) -> DecoderBlock:
    block = DecoderBlock(
        Attention(HIDDEN, HEADS, GROUPS, HEAD_DIM, bias=bias),
        GatedMLP(HIDDEN, INNER, bias=bias),
        RMSNorm(HIDDEN),
        RMSNorm(HIDDEN),
    )
    randomize(block)
    return block


def context() -> AttentionContext:
    return AttentionContext(*RotaryEmbedding(HEAD_DIM)(torch.arange(SEQ)[None], SEQ))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, BATCH, SEQ, HIDDEN, generator=generator).to(dtype)
    return x.clone().requires_grad_(), residual.clone().requires_grad_()


def make_sandwich() -> SandwichBlock:
    norms = [RMSNorm(HIDDEN, offset=1.0, casting_mode="gemma") for _ in range(4)]
    mlp = GatedMLP(HIDDEN, INNER, activation="gelu_tanh")
    block = SandwichBlock(Attention(HIDDEN, HEADS, GROUPS, HEAD_DIM, sliding_window=5), mlp, *norms)
    randomize(block)
    return block


def by_parts(block: DecoderBlock | SandwichBlock, x: Tensor, residual: Tensor | None) -> Tensor:
    """Return the block's output from its modules, one by one and without fusion."""
    total = x if residual is None else x + residual
    out = block.self_attn(block.input_layernorm(total), context())
    if isinstance(block, SandwichBlock):
        total = total + block.post_attention_layernorm(out)
        out = block.mlp(block.pre_feedforward_layernorm(total))
        return total + block.post_feedforward_layernorm(out)
    total = total + out
    return total + block.mlp(block.post_attention_layernorm(total))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("build", [make, partial(make, True), make_sandwich])
def test_equals_its_parts(build: Callable[[], Any], with_residual: bool) -> None:
    block = build()
    x, residual = inputs()
    leaves = [x, residual, *block.parameters()] if with_residual else [x, *block.parameters()]
    added = residual if with_residual else None
    upstream = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))
    out = sum(block(x, added, context()))
    grads = torch.autograd.grad(out, leaves, upstream)
    expected = by_parts(block, x, added)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    assert relative(out, expected) <= 1e-6
    for grad, want in zip(grads, wanted):
        assert relative(grad, want) <= 1e-5


class Scaled(nn.Linear):
    """A subclass of Linear that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * super().forward(x)


def scaled(linear: nn.Linear) -> nn.Linear:
    replaced = Scaled(linear.in_features, linear.out_features, bias=linear.bias is not None)
    replaced.load_state_dict(linear.state_dict())
    return replaced


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda module, args, out: 1.5 * out)
    return linear


PROJECTIONS = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("swap", [scaled, hooked])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_swapped_projection_is_called(name: str, swap: Callable[[nn.Linear], nn.Linear]) -> None:
    """Each swap multiplies the projection by 1.5, which equals a plain one with 1.5 W."""
    block, expected_block = make(), make()
    path, attribute = name.split(".")
    parent = getattr(block, path)
    with torch.no_grad():
        getattr(getattr(expected_block, path), attribute).weight.mul_(1.5)
    setattr(parent, attribute, swap(getattr(parent, attribute)))
    x, residual = inputs()
    out = sum(block(x, residual, context()))
    expected = sum(expected_block(x, residual, context()))
    assert relative(out, expected) <= 1e-6
    upstream = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, [x, residual, *block.parameters()], upstream)
    wanted = torch.autograd.grad(expected, [x, residual, *expected_block.parameters()], upstream)
    names = ["x", "residual", *(n for n, _ in expected_block.named_parameters())]
    for key, grad, want in zip(names, grads, wanted, strict=True):
        factor = 1.5 if key == f"{name}.weight" else 1.0
        assert relative(grad, factor * want) <= 1e-5, key
