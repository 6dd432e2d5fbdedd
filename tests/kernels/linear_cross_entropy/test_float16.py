"""The loss head in float16, whose range gradients and their sums easily exceed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ligermodels.kernels import linear_cross_entropy
from tests.kernels import formulas
from tests.kernels.checks import random
from tests.kernels.conftest import FLOAT32_PLACES
from tests.kernels.linear_cross_entropy.head import (
    LEAVES,
    VOCAB,
    WIDTH,
    head_loss,
    inputs,
    least_budget,
    on,
)
from tests.pairwise import pairwise


@pytest.mark.parametrize("rows, width, vocab", [(64, 2, 4), (24, 30, 128)])
def test_float16_gradients_do_not_overflow(float32_place, rows, width, vocab) -> None:
    """Neither hidden times the upstream gradient nor its sum over the tokens exceeds 65504."""
    half = {"device": float32_place.device, "dtype": torch.float16}  # on every place
    weight = torch.zeros(vocab, width, **half, requires_grad=True)
    signs = torch.ones(rows).view(-1, 2).mul(torch.tensor([1.0, -1.0])).view(-1, 1)
    hidden = (100 * signs).expand(rows, width).to(**half)
    targets = torch.arange(rows, device=float32_place.device) // 2 % vocab
    (linear_cross_entropy(hidden, weight, targets, reduction="sum").loss * 1024).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    weight.grad = None
    loss = linear_cross_entropy(hidden.abs() * 30, weight, torch.zeros_like(targets)).loss
    (loss * 8).backward()
    expected = torch.full((vocab,), 3000 * 8 / vocab)
    expected[0] -= 3000 * 8  # the mean over tokens whose sum exceeds 65504
    torch.testing.assert_close(weight.grad[:, 0].float().cpu(), expected, rtol=1e-3, atol=1e-3)


TOKENS, CLASSES = 24, 100
SCALES: dict[str, dict[str, Any]] = {
    "normalised": {"class_weights": torch.full((CLASSES,), 1 / CLASSES)},
    "tiny": {"class_weights": torch.full((CLASSES,), 1e-7)},
    "large": {"class_weights": torch.full((CLASSES,), 7e4)},
    "spread": {"class_weights": torch.logspace(-3, 6, CLASSES)},
    # Forward scales the gradients by the largest weight of a token, so that they fit.
    "tokens": {"token_weights": torch.linspace(-3e5, 3e5, TOKENS)},
    # The loss scale must be applied before 1 / normalizer.
    "many tokens": {"normalizer": 2.0**20},
}
LOSS_SCALES = {"tokens": 1e-4, "many tokens": 2.0**16}


@pairwise(
    lambda name, cut: cut != "columns" or name == "spread",  # It is slow there.
    indirect=["float32_place"],
    float32_place=FLOAT32_PLACES,
    name=SCALES,
    cut=["one chunk", "rows", "columns"],
    label_smoothing=[0.0, 0.1],
)
def test_float16_gradients_at_any_scale(float32_place, name, cut, label_smoothing) -> None:
    """A scale of the loss or of its weights must not be lost in the range of float16."""
    half = float32_place._replace(dtype=torch.float16)
    # With a width larger than the rows, the head keeps the gradient of the logits for backward.
    tokens = 10 if cut == "columns" else TOKENS  # Columns are slow in the interpreter.
    for width in (WIDTH, tokens + 8):
        made = inputs((tokens,), width, CLASSES, bias=False, label_smoothing=label_smoothing)
        made["hidden"] = random(tokens, width, seed=1, scale=0.3).half()
        made["weight"] = random(CLASSES, width, seed=2, scale=0.3).half()
        made |= SCALES[name]
        if cut == "columns":
            least = least_budget(on(half, made), linear_cross_entropy)
            made["max_scratch_bytes"] = least + 12 * VOCAB * 2
        elif cut == "rows":
            made["chunk_size"] = 9
        grads = []
        for dtype, op in (
            (torch.float64, formulas.linear_cross_entropy),
            (torch.float16, head_loss),
            (torch.float16, formulas.linear_cross_entropy),
        ):
            placed = on(float32_place._replace(dtype=dtype), made)
            loss = op(**placed)[0] * LOSS_SCALES.get(name, 4096)
            leaves = [placed[k] for k in LEAVES[:2]]
            grads.append([x.double() for x in torch.autograd.grad(loss, leaves)])
        for leaf, exact, ours, eager in zip(LEAVES, *grads):
            mine, theirs = ((x - exact).norm() / exact.norm() for x in (ours, eager))
            assert mine < 2 * theirs, (width, leaf)
