"""ORPO, CPO and SimPO: against TRL's own code, Liger's, and plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import ConfigError
from ligermodels.losses.reference_free import CPO_LOSS_TYPES, cpo_loss, orpo_loss
from tests.losses import trl_own
from tests.losses.batches import gradients, masks, random_tokens

CPO_OPTIONS = [
    *({"loss_type": name, "label_smoothing": 0.1} for name in CPO_LOSS_TYPES),
    {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.2, "beta": 2.0},
    {"alpha": 0.2, "cpo_alpha": 0.5},
    {"loss_type": "simpo", "alpha": -0.5},
]


def random_logits(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits (rows, seq + 1, vocab), ids (rows, seq + 1), and log-probs (rows, seq)."""
    generator = torch.Generator().manual_seed(0)
    shape = len(mask), mask.shape[1] + 1
    logits = torch.randn(*shape, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(9, shape, generator=generator)
    log_probs = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return logits, ids, log_probs


def our_loss(name: str, log_probs: torch.Tensor, mask: torch.Tensor, **options):
    if name == "orpo":
        # TRL takes the likelihood of prompt and completion.
        return orpo_loss(log_probs, mask, nll_mask=torch.ones_like(mask), **options)
    return cpo_loss(log_probs, mask, **options)


EVERY = [("orpo", {}), ("orpo", {"beta": 0.7}), *(("cpo", options) for options in CPO_OPTIONS)]


def test_equal_trl() -> None:
    pytest.importorskip("trl", exc_type=ImportError)
    for name, options in EVERY:
        for kind, mask in masks(6):
            logits, ids, log_probs = random_logits(mask)
            loss, metrics = our_loss(name, log_probs, mask, **options)
            (ours,) = gradients(loss, logits)
            assert loss.isfinite() and ours.isfinite().all()
            if kind in ("empty completions", "all ignored"):
                continue  # TRL has the mean of nothing, NaN
            expected, trl_metrics = trl_own.reference_free(name, logits, ids, mask, **options)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(ours, gradients(expected, logits)[0])
            for key in metrics:
                if key != "nll_loss" or options.get("cpo_alpha", 1.0):
                    assert float(metrics[key].value) == pytest.approx(trl_metrics[key], abs=1e-6)


def test_equal_liger() -> None:
    pytest.importorskip("liger_kernel")
    from liger_kernel.chunked_loss.cpo_loss import LigerFusedLinearCPOFunction
    from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction
    from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOFunction

    tokens = random_tokens(next(masks(6))[1])
    sums = (tokens.log_probs * tokens.mask).sum(1)
    means = (sums / tokens.mask.sum(1)).chunk(2)
    sums = sums.chunk(2)
    every = [
        (
            orpo_loss(tokens.log_probs, tokens.mask, nll_mask=torch.zeros_like(tokens.mask)),
            LigerFusedLinearORPOFunction.preference_loss_fn(*means, tokens.mask)[0],
        ),
        (
            cpo_loss(tokens.log_probs, tokens.mask, cpo_alpha=0, label_smoothing=0.1),
            LigerFusedLinearCPOFunction.preference_loss_fn(*sums, tokens.mask, label_smoothing=0.1)[
                0
            ],
        ),
        (
            cpo_loss(tokens.log_probs, tokens.mask, loss_type="simpo", cpo_alpha=0),
            LigerFusedLinearSimPOFunction.preference_loss_fn(*means, tokens.mask, gamma=0.5)[0],
        ),
    ]
    for ours, expected in every:
        torch.testing.assert_close(abs(ours.loss), abs(expected))
        ours_grad, expected_grad = (
            gradients(loss, tokens.log_probs)[0] for loss in (ours.loss, expected)
        )
        sign = torch.sign(ours.loss * expected)  # Liger's ORPO term is what is subtracted
        torch.testing.assert_close(ours_grad, sign * expected_grad)


def test_certain_and_empty_completions_have_finite_gradients() -> None:
    for dtype in (torch.float32, torch.float64):
        log_probs = torch.tensor([[0.0, 0.0], [-1e-9, 0.0], [-2.0, -300.0], [0.0, -1.0]])
        log_probs = log_probs.to(dtype).requires_grad_()
        mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]).bool()
        loss = orpo_loss(log_probs, mask).loss
        assert loss.isfinite() and gradients(loss, log_probs)[0].isfinite().all()


def test_micro_batches_equal_one_batch() -> None:
    mask = next(masks(6))[1]
    for name, options in EVERY:
        _, _, log_probs = random_logits(mask)
        whole = our_loss(name, log_probs, mask, **options).loss
        tokens = 3 * mask.shape[1] if name == "orpo" else mask[:3].sum()
        total = sum(
            our_loss(
                name,
                log_probs[rows],
                mask[rows],
                normalizer=3,
                token_normalizer=tokens,
                **options,
            ).loss
            for rows in ([0, 3], [1, 2, 4, 5])
        )
        torch.testing.assert_close(total, whole)
        torch.testing.assert_close(gradients(total, log_probs), gradients(whole, log_probs))


def test_float32_equals_float64() -> None:
    tokens = random_tokens(next(masks(6))[1])
    narrow = tokens.to(torch.float32)
    for name, options in EVERY:
        wide = our_loss(name, tokens.log_probs, tokens.mask, **options).loss
        single = our_loss(name, narrow.log_probs, tokens.mask, **options).loss
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), wide, rtol=1e-5, atol=1e-5)
        (one,), (other,) = gradients(single, narrow.log_probs), gradients(wide, tokens.log_probs)
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_what_is_refused() -> None:
    tokens = random_tokens(next(masks(4))[1])
    with pytest.raises(ConfigError, match="loss_type: 'dpo' is not known"):
        cpo_loss(tokens.log_probs, tokens.mask, loss_type="dpo")
    with pytest.raises(ConfigError, match="beta: must be a finite number above 0"):
        cpo_loss(tokens.log_probs, tokens.mask, loss_type="ipo", beta=0.0)
    with pytest.raises(ConfigError, match="nll_mask: the shape"):
        orpo_loss(tokens.log_probs, tokens.mask, nll_mask=tokens.mask[:, 1:])
    with pytest.raises(ConfigError, match="expected the chosen"):
        cpo_loss(tokens.log_probs[:3], tokens.mask[:3])
