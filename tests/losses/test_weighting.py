"""Weightings of the next-token loss: against TRL's own code and plain autograd."""

from __future__ import annotations

import torch

from ligermodels.losses.terms import sft_loss
from tests.losses import trl_own
from tests.losses.batches import assert_refused, assert_same, gradients, masks, random_tokens


def test_equal_trl() -> None:
    for name in ("nll", "dft"):
        for _, mask in masks(4):
            tokens = random_tokens(mask)
            loss = sft_loss(tokens.log_probs, mask, loss_type=name).loss
            expected = trl_own.sft(tokens, name)
            assert_same(loss, expected, tokens.log_probs)


def test_focal_and_given_weights() -> None:
    mask = next(masks(4))[1]
    tokens = random_tokens(mask)
    p = tokens.log_probs.exp()
    loss = sft_loss(tokens.log_probs, mask, loss_type="focal", focal_gamma=1.5).loss
    expected = (-tokens.log_probs * (1 - p) ** 1.5)[mask].mean()
    assert_same(loss, expected, tokens.log_probs)
    certain = torch.zeros(1, 1, requires_grad=True)
    loss = sft_loss(certain, torch.ones(1, 1), loss_type="focal", focal_gamma=0.5).loss
    assert loss == 0 and gradients(loss, certain)[0].abs() < 1e-18
    for weights in (torch.rand(mask.shape), torch.rand(4, 1)):
        loss = sft_loss(tokens.log_probs, mask, weights=weights.double()).loss
        torch.testing.assert_close(loss, -(tokens.log_probs * weights)[mask].mean())


def test_what_is_refused() -> None:
    tokens = random_tokens(torch.ones(4, 4, dtype=torch.bool))
    given, one = (tokens.log_probs, tokens.mask), torch.ones(2, 4, 4)
    assert_refused(
        ("loss_type: 'eaft' is not known", lambda: sft_loss(*given, loss_type="eaft")),
        (r"weights: .*\(4,\).* or \(4, 1\)", lambda: sft_loss(*given, weights=one[0, 0])),
        (r"weights: .*\(1, 4\)", lambda: sft_loss(*given, weights=one[0, :1])),
        (r"weights: .*\(2, 4, 4\)", lambda: sft_loss(*given, weights=one)),
    )
