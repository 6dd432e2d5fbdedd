"""The loss head in float16, whose range gradients and their sums leave easily."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels import linear_cross_entropy
from tests.kernels import formulas
from tests.kernels.checks import random
from tests.kernels.conftest import INTERPRETING
from tests.kernels.linear_cross_entropy.test_functions import WIDTH, inputs
from tests.kernels.test_cross_entropy import targets_for


def test_float16_gradients_do_not_underflow(place) -> None:
    """A mean over many tokens: 1 / tokens belongs behind the loss scale, not before it."""
    if place.dtype != torch.float32:
        pytest.skip("float16 alone")
    made = inputs((512,), 8, 16, bias=False)
    exact = {
        k: v.half().double() if v.is_floating_point() else v
        for k, v in made.items()
        if v is not None
    }
    half = {
        k: v.half().to(place.device) if v.is_floating_point() else v.to(place.device)
        for k, v in made.items()
        if v is not None
    }
    for leaves in (exact, half):
        leaves["hidden"].requires_grad_()
    normalizer, loss_scale = 2.0**20, 2.0**16
    (formulas.linear_cross_entropy(**exact, normalizer=normalizer)[0] * loss_scale).backward()
    (linear_cross_entropy(**half, normalizer=normalizer)[0] * loss_scale).backward()
    grad = half["hidden"].grad.double().cpu()
    torch.testing.assert_close(grad, exact["hidden"].grad, rtol=2e-2, atol=1e-4)


def test_float16_weight_gradients_do_not_overflow(place) -> None:
    """Of a frequent target and an outlying channel the sum over the tokens passes 65504."""
    if place.dtype != torch.float32:
        pytest.skip("float16 alone")
    rows = 8192
    hidden = torch.full((rows, 2), 30.0, dtype=torch.float16, device=place.device)
    weight = torch.zeros(4, 2, dtype=torch.float16, device=place.device, requires_grad=True)
    targets = (torch.arange(rows, device=place.device) % 2).mul_(3)
    (linear_cross_entropy(hidden, weight, targets).loss * 2.0**8).backward()
    expected = torch.tensor([0.25 - 0.5, 0.25, 0.25, 0.25 - 0.5]) * 30 * 2.0**8
    torch.testing.assert_close(weight.grad[:, 0].float().cpu(), expected, rtol=1e-3, atol=1e-3)


def test_float16_gradients_of_few_rows_do_not_overflow(place) -> None:
    """Neither hidden times the upstream gradient nor its sum over the tokens may pass 65504."""
    if place.dtype != torch.float32:
        pytest.skip("float16 alone")
    rows, loss_scale = 64, 2.0**10
    signs = torch.ones(rows).view(-1, 2).mul(torch.tensor([1.0, -1.0])).view(-1, 1)
    hidden = (100 * signs).expand(rows, 70).to(place.device, torch.float16)
    weight = torch.zeros(128, 70, dtype=torch.float16, device=place.device, requires_grad=True)
    targets = torch.arange(rows, device=place.device) // 2
    (linear_cross_entropy(hidden, weight, targets, reduction="sum").loss * loss_scale).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    hidden = hidden.abs() * 30
    weight.grad = None
    (linear_cross_entropy(hidden, weight, torch.zeros_like(targets)).loss * 8).backward()
    expected = torch.full((128,), 3000 * 8 / 128)
    expected[0] -= 3000 * 8  # of 64 tokens; their sum is beyond float16
    torch.testing.assert_close(weight.grad[:, 0].float().cpu(), expected, rtol=1e-3, atol=1e-3)


CLASS_WEIGHTS = {
    "normalised": torch.full((400,), 1 / 400),
    "tiny": torch.full((400,), 1e-7),
    "large": torch.full((400,), 7e4),
    "spread": torch.logspace(-3, 6, 400),
}


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cut", [{}, {"chunk_size": 30}, {"max_scratch_bytes": 26_000}], ids=str)
@pytest.mark.parametrize("name", CLASS_WEIGHTS)
def test_float16_gradients_whatever_the_class_weights(place, name, cut, label_smoothing) -> None:
    """A mean does not depend on their scale, and its gradients in float16 must not either."""
    if place.dtype != torch.float32:
        pytest.skip("float16 alone")
    class_weights = CLASS_WEIGHTS[name].to(place.device)
    options = {"label_smoothing": label_smoothing}
    if cut.get("max_scratch_bytes") and place.device == "cpu" and not INTERPRETING:
        cut = {"max_scratch_bytes": 64_000}  # for what plain PyTorch makes of a row
    errors = {}
    for width in (WIDTH, 128):  # of more than the rows, which then keep the logits' gradient
        hidden, weight = (
            random(rows, width, seed=seed, scale=0.3).half().to(place.device)
            for rows, seed in ((100, 1), (400, 2))
        )
        targets = targets_for((100,), 400).to(place.device)
        grads = []
        for kind in ("float64", "ours", "eager"):
            dtype = torch.float64 if kind == "float64" else torch.float16
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
            if kind == "ours":
                made = linear_cross_entropy(
                    *leaves, targets, class_weights=class_weights, **options, **cut
                ).loss
            else:
                logits = (leaves[0] @ leaves[1].t()).to(torch.promote_types(dtype, torch.float32))
                made = F.cross_entropy(logits, targets, class_weights.to(logits), **options)
            grads.append([x.double() for x in torch.autograd.grad(made * 4096, leaves)])
        exact, *found = grads
        for leaf, true, *results in zip(("hidden", "weight"), exact, *found):
            mine, theirs = ((x - true).norm() / true.norm() for x in results)
            errors[width, leaf] = mine / theirs
    assert max(errors.values()) < 2, errors
