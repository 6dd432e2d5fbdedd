"""Cross entropy of logits: its options, its mean, extreme logits and targets out of range.

`test_grid.py` tests sizes, layouts, frozen inputs and retained graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ligermodels.kernels import cross_entropy
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.loss_options import (
    TOKEN_STATS,
    CrossEntropyOptions,
    CrossEntropyOutput,
    OutputGrads,
    TokenRequest,
    TokenStats,
    target_weight_sum,
)
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import FLOAT32, FLOAT64, PLACES, Place, places
from tests.kernels.ops_table import LOSS_OPTIONS, targets
from tests.kernels.ops_table import cross_entropy as inputs
from tests.pairwise import pairwise

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "temperature": {"temperature": 0.7, "softcap": 3.0},
    "weights": {"class_weights": True},
    "ignored in the vocabulary": {"ignore_index": 0},
    "everything": LOSS_OPTIONS | {"ignore_index": -1},
}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the usual": {"return_token_stats": True},
    "squares": {"return_token_stats": ("sum_sq_probs",)},
    "mean": {"return_token_stats": ("mean_logits",)},
    "alternatives": {"alternatives": True},
    "the likeliest": {"top_k": 1},
    "all": {"return_token_stats": TOKEN_STATS, "alternatives": True, "top_k": 1},
}
"""What is asked of each token."""


def names_without_ties(place: Place) -> list[str]:
    """Return the names of ASKED without the likeliest classes in 16 bits, where logits tie."""
    low = place.dtype.itemsize == 2
    return [name for name in ASKED if not (low and "top_k" in ASKED[name])]


def loss(**options: Any) -> CrossEntropyOutput:
    """Return the outputs that the formula has."""
    return cross_entropy(**options)._replace(correct=None, top_ids=None)


@pairwise(
    lambda place, asked: asked in names_without_ties(place),
    # A log-probability of one class is 0 except for the rounding of two capped logits.
    lambda name, vocab: vocab > 1 or "softcap" not in OPTIONS[name],
    indirect=["place"],
    place=PLACES,
    name=OPTIONS,
    reduction=["none", "sum", "mean"],
    asked=ASKED,
    vocab=[37, 1, 1023, 1024, 1025, 5000],  # also the edges of a block
)
def test_options(place, name, reduction, asked, vocab) -> None:
    """Compare for random upstream gradients of the loss and of what is asked of tokens."""
    made = inputs((7,), vocab, **OPTIONS[name], **ASKED[asked], reduction=reduction)
    compare(loss, formulas.cross_entropy, made, place, constant=("class_weights",))


def test_all_ignored(place) -> None:
    targets = torch.full((3,), -100, device=place.device)
    for reduction in ("none", "sum", "mean"):
        logits = random(3, 8).to(place.dtype).to(place.device)
        logits[1, 2] = float("inf")  # the loss does not depend on the logits of ignored rows
        logits.requires_grad_()
        loss, z_loss, *_ = cross_entropy(logits, targets, reduction=reduction, z_loss=0.1)
        loss.sum().backward()
        for x in (loss, z_loss, logits.grad):
            assert torch.equal(x, torch.zeros_like(x)), reduction


def test_extreme_logits(place) -> None:
    """Large logits do not overflow; a class at -infinity has probability 0 and no gradient."""
    inf = float("inf")
    rows = [[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [-inf, 1.0, 1.0], [3e4, 3e4, -inf]]
    logits = torch.tensor(rows, dtype=place.dtype, device=place.device, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 0], device=place.device)
    out = cross_entropy(logits, targets, reduction="none", return_token_stats=True)
    log2, log3 = torch.tensor([2.0, 3.0]).log().tolist()
    expected = torch.tensor([0.0, log3, log2, log2], dtype=out.loss.dtype, device=place.device)
    for ours, want in ((out.loss, expected), (out.log_probs, -expected), (out.entropy, expected)):
        torch.testing.assert_close(ours, want, rtol=1e-3, atol=3e-3)
    (out.loss.sum() + 2 * out.log_probs.sum() + 3 * out.entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[2, 0] == 0 and logits.grad[3, 2] == 0


OUT_OF_RANGE = [-1, 5, 2**40, -(2**40), 2**62]


@pytest.mark.parametrize("weights", [False, True])
def test_rows_with_a_target_out_of_range_are_nan(float32_place, weights) -> None:
    """A GPU returns NaN and reads nothing out of bounds. This calls the kernels, not the op.

    The op itself raises an error on the CPU. The class weights lie between large numbers: a read
    out of bounds would change the divisor, which does not count the target.
    """
    device = float32_place.device
    class_weights = None
    if weights:
        class_weights = torch.tensor([1e6, 3.0, 0.5, 7.0, 7.0, 0.25, 1e6], device=device)[1:-1]
    for target in OUT_OF_RANGE:
        logits = random(4, 5, seed=2).float().to(device)
        targets = torch.tensor([1, target, -100, 4], device=device)
        stats = TokenStats.empty(4, logits, TokenRequest(TOKEN_STATS))
        options, ops = CrossEntropyOptions(z_loss=0.1), select("cross_entropy", logits)
        rows = ops.cross_entropy_rows
        loss, z, *_ = rows(logits, targets, None, None, class_weights, options, False, stats=stats)
        grads = OutputGrads(torch.ones(1, device=device))
        *_, grad = rows(logits, targets, grads, None, class_weights, options, False)
        for x in (loss, z, stats.log_probs, stats.entropy, stats.sum_sq_probs, stats.mean_logits):
            assert x[1].isnan() and x[0].isfinite() and x[2] == 0, target
        assert not stats.correct[1] and not stats.correct[2], target
        assert grad[1].isnan().all() and grad[0].isfinite().all(), target
        assert (grad[2] == 0).all(), target
        assert target_weight_sum(targets, class_weights, -100, loss.dtype) == (
            0.75 if weights else 3
        ), target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_may_be_changed_in_place(float32_place, reduction) -> None:
    """A training loop may run `loss /= steps`, which autograd forbids if an op returns views."""
    logits = random(3, 8).float().to(float32_place.device).requires_grad_()
    targets = torch.tensor([1, 2, 3], device=float32_place.device)
    loss = cross_entropy(logits, targets, reduction=reduction).loss
    loss /= 2
    loss.sum().backward()
    expected = cross_entropy(logits, targets, reduction=reduction).loss.sum() / 2
    assert torch.equal(logits.grad, torch.autograd.grad(expected, logits)[0])


# In lower precision the logits themselves are rounded.
@pairwise(
    indirect=["place"],
    place=places(FLOAT32, FLOAT64, gpu=(FLOAT32,)),
    offset=[1e3, 2.0**20, 3e38],
    smoothing=[0.0, 0.1],
)
def test_large_logits_keep_their_differences(place, offset, smoothing) -> None:
    """A constant added to all logits changes nothing, although the logsumexp grows with it."""
    spread = 0 if offset == 3e38 else torch.arange(40).view(4, 10) * 7 % 11
    logits = (torch.full((4, 10), offset) + spread).to(place.dtype).to(place.device)
    targets = torch.tensor([0, 3, 9, 5], device=place.device)
    made = []
    for x in (logits, logits - offset):
        x = x.clone().requires_grad_()
        loss = cross_entropy(x, targets, label_smoothing=smoothing).loss
        loss.backward()
        made += [(loss.detach(), x.grad)]
    for large, small in zip(*made):
        torch.testing.assert_close(large, small, rtol=1e-6, atol=1e-7)


def test_correct_is_whether_argmax_is_the_target(place) -> None:
    """Among equal logits the lowest class counts. A softcap may round different logits alike."""
    rows, vocab = 50, 40
    logits = (random(rows, vocab, seed=4) * 2).round().to(place.device, place.dtype)
    assert ((logits == logits.amax(-1, keepdim=True)).sum(-1) > 1).sum() > 5
    best = logits.cpu().argmax(-1)
    last = vocab - 1 - logits.cpu().flip(-1).argmax(-1)  # the last class of the largest logit
    for chosen in (best, last, targets((rows,), vocab)):
        out = cross_entropy(logits, chosen.to(place.device), return_token_stats=True)
        assert torch.equal(out.correct.cpu(), best == chosen)
    capped = torch.tensor([[500.0, 600.0, 400.0]] * 3, device=place.device, dtype=place.dtype)
    each = torch.arange(3, device=place.device)
    out = cross_entropy(capped, each, softcap=2.0, return_token_stats=True)
    assert out.correct.tolist() == [False, True, False]
