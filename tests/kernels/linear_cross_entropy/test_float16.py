"""The loss head in float16, whose range gradients and their sums easily exceed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ligermodels.kernels import linear_cross_entropy
from tests.kernels import formulas
from tests.kernels.checks import random
from tests.kernels.conftest import FLOAT32_PLACES
from tests.kernels.linear_cross_entropy.head import (
    VOCAB,
    WIDTH,
    head_loss,
    inputs,
    least_budget,
    on,
)
from tests.kernels.ops_table import targets
from tests.pairwise import pairwise


def test_float16_gradients_do_not_underflow(float32_place) -> None:
    """In a mean over many tokens, the loss scale must be applied before 1 / tokens."""
    half = on(float32_place._replace(dtype=torch.float16), inputs((32,), 8, 16, normalizer=2.0**20))
    exact = {
        k: x.detach().double() if torch.is_tensor(x) and x.is_floating_point() else x
        for k, x in half.items()
    }
    exact["hidden"].requires_grad_()
    for op, made in ((formulas.linear_cross_entropy, exact), (head_loss, half)):
        (op(**made)[0] * 2.0**16).backward()
    grad = half["hidden"].grad.double()
    torch.testing.assert_close(grad, exact["hidden"].grad, rtol=2e-2, atol=1e-4)


def test_float16_weight_gradients_do_not_overflow(float32_place) -> None:
    """The sum over the tokens of a frequent target and an outlier channel exceeds 65504."""
    place = float32_place  # the tensors below are float16 everywhere
    rows, loss_scale = 64, 16
    hidden = torch.full((rows, 2), 6000.0, dtype=torch.float16, device=place.device)
    weight = torch.zeros(4, 2, dtype=torch.float16, device=place.device, requires_grad=True)
    targets = (torch.arange(rows, device=place.device) % 2).mul_(3)
    (linear_cross_entropy(hidden, weight, targets).loss * loss_scale).backward()
    expected = torch.tensor([0.25 - 0.5, 0.25, 0.25, 0.25 - 0.5]) * 6000 * loss_scale
    torch.testing.assert_close(weight.grad[:, 0].float().cpu(), expected, rtol=1e-3, atol=1e-3)


def test_float16_gradients_of_few_rows_do_not_overflow(float32_place) -> None:
    """Neither hidden times the upstream gradient nor its sum over the tokens exceeds 65504."""
    place = float32_place  # the tensors below are float16 everywhere
    rows, loss_scale = 24, 2.0**10
    signs = torch.ones(rows).view(-1, 2).mul(torch.tensor([1.0, -1.0])).view(-1, 1)
    hidden = (100 * signs).expand(rows, 30).to(place.device, torch.float16)
    weight = torch.zeros(128, 30, dtype=torch.float16, device=place.device, requires_grad=True)
    targets = torch.arange(rows, device=place.device) // 2
    (linear_cross_entropy(hidden, weight, targets, reduction="sum").loss * loss_scale).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    hidden = hidden.abs() * 30
    weight.grad = None
    (linear_cross_entropy(hidden, weight, torch.zeros_like(targets)).loss * 8).backward()
    expected = torch.full((128,), 3000 * 8 / 128)
    expected[0] -= 3000 * 8  # the mean over tokens whose sum exceeds 65504
    torch.testing.assert_close(weight.grad[:, 0].float().cpu(), expected, rtol=1e-3, atol=1e-3)


TOKENS, CLASSES = 24, 100
CLASS_WEIGHTS = {
    "normalised": torch.full((CLASSES,), 1 / CLASSES),
    "tiny": torch.full((CLASSES,), 1e-7),
    "large": torch.full((CLASSES,), 7e4),
    "spread": torch.logspace(-3, 6, CLASSES),
}


@pairwise(
    lambda name, cut: cut != "columns" or name == "spread",  # It is slow there.
    indirect=["float32_place"],
    float32_place=FLOAT32_PLACES,
    name=CLASS_WEIGHTS,
    cut=["one chunk", "rows", "columns"],
    label_smoothing=[0.0, 0.1],
)
def test_float16_gradients_for_any_class_weights(float32_place, name, cut, label_smoothing) -> None:
    """A mean does not depend on the scale of the weights; its float16 gradients must not either."""
    place = float32_place  # the tensors below are float16 everywhere
    class_weights = CLASS_WEIGHTS[name].to(place.device)
    options = {"label_smoothing": label_smoothing}
    errors = {}
    # With a width larger than the rows, the head keeps the gradient of the logits for backward.
    tokens = 10 if cut == "columns" else TOKENS  # Columns are slow in the interpreter.
    for width in (WIDTH, tokens + 8):
        hidden, weight = (
            random(rows, width, seed=seed, scale=0.3).half().to(place.device)
            for rows, seed in ((tokens, 1), (CLASSES, 2))
        )
        classes = targets((tokens,), CLASSES).to(place.device)
        made = {"hidden": hidden, "weight": weight, "targets": classes}
        made |= {"class_weights": class_weights}
        cuts = {"one chunk": {}, "rows": {"chunk_size": 9}}
        if cut == "columns":
            half = place._replace(dtype=torch.float16)
            least = least_budget(on(half, made | options), linear_cross_entropy)
            cuts[cut] = {"max_scratch_bytes": least + 12 * VOCAB * 2}
        grads = []
        for kind in ("float64", "ours", "eager"):
            dtype = torch.float64 if kind == "float64" else torch.float16
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
            if kind == "ours":
                loss = linear_cross_entropy(
                    *leaves, classes, class_weights=class_weights, **options, **cuts[cut]
                ).loss
            else:
                logits = (leaves[0] @ leaves[1].t()).to(torch.promote_types(dtype, torch.float32))
                loss = F.cross_entropy(logits, classes, class_weights.to(logits), **options)
            grads.append([x.double() for x in torch.autograd.grad(loss * 4096, leaves)])
        exact, *found = grads
        for leaf, true, *results in zip(("hidden", "weight"), exact, *found):
            mine, theirs = ((x - true).norm() / true.norm() for x in results)
            errors[width, leaf] = mine / theirs
    assert max(errors.values()) < 2, errors


def test_float16_gradients_with_large_weights_of_tokens(float32_place) -> None:
    """Forward scales the gradients by the largest weight, so that they fit into float16."""
    found = []
    for dtype in (torch.float16, torch.float64):
        made = inputs((32,), 8, 16, bias=False)
        made |= {k: made[k].half() for k in ("hidden", "weight")}
        leaves = on(float32_place._replace(dtype=dtype), made)
        weights = torch.linspace(-3e5, 3e5, 32, device=float32_place.device)
        loss = linear_cross_entropy(**leaves, token_weights=weights).loss
        (loss / 1e4).backward()
        found.append(leaves["hidden"].grad.double())
    torch.testing.assert_close(*found, rtol=2e-2, atol=1e-3)
