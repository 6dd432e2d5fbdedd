"""ORPO, CPO and SimPO: against TRL's own code."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ligermodels.losses.preference import CPO_LOSS_TYPES, cpo_loss, orpo_loss
from tests.losses import trl_own
from tests.losses.batches import (
    assert_metrics,
    assert_refused,
    assert_same,
    gradients,
    masks,
    random_tokens,
)

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
    for name, options in EVERY:
        for kind, mask in masks(6):
            logits, ids, log_probs = random_logits(mask)
            loss, metrics = our_loss(name, log_probs, mask, **options)
            assert loss.isfinite() and gradients(loss, logits)[0].isfinite().all()
            if kind in ("empty completions", "all ignored"):
                continue  # TRL has the mean of nothing, NaN
            expected, trl_metrics = trl_own.reference_free(name, logits, ids, mask, **options)
            assert_same(loss, expected, logits)
            if not options.get("cpo_alpha", 1.0):
                del metrics["nll_loss"]  # TRL's is 0
            assert_metrics(metrics, trl_metrics)


def test_certain_and_empty_completions_have_finite_gradients() -> None:
    for dtype in (torch.float32, torch.float64):
        log_probs = torch.tensor([[0.0, 0.0], [-1e-9, 0.0], [-2.0, -300.0], [0.0, -1.0]])
        log_probs = log_probs.to(dtype).requires_grad_()
        mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]]).bool()
        loss = orpo_loss(log_probs, mask).loss
        assert loss.isfinite() and gradients(loss, log_probs)[0].isfinite().all()


def test_what_is_refused() -> None:
    tokens = random_tokens(next(masks(4))[1])
    given = tokens.log_probs, tokens.mask
    assert_refused(
        ("loss_type: 'dpo' is not known", lambda: cpo_loss(*given, loss_type="dpo")),
        ("beta: must be a finite number above 0", lambda: cpo_loss(*given, beta=0.0)),
        ("nll_mask: the shape", lambda: orpo_loss(*given, nll_mask=tokens.mask[:, 1:])),
        ("expected the chosen", lambda: cpo_loss(*(x[:3] for x in given))),
    )
