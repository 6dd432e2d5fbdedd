"""DPO with all its options, and KTO: against TRL's own code and plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.losses.kto import kto_kl, kto_loss
from ligermodels.losses.preference import DIVERGENCES, DPO_LOSS_TYPES, dpo_loss
from tests.losses import trl_own
from tests.losses.batches import (
    assert_metrics,
    assert_refused,
    assert_same,
    gathered,
    gradients,
    masks,
    random_tokens,
)
from tests.pairwise import pairwise

# Those that sort the pairs, and two that TRL changes in place, which autograd refuses.
UNWEIGHTED = ("aot", "aot_unpaired", "hinge", "sft")
OF_ANY_DIVERGENCE = "sigmoid sigmoid_norm hinge ipo exo_pair robust discopop sft".split()


def our_dpo(tokens, **options):
    if options.get("use_weighting"):
        options["log_sum_sq_probs"] = tokens.sum_sq
    return dpo_loss(tokens.log_probs, tokens.ref, tokens.mask, **options)


def check_dpo(options: dict[str, Any]) -> None:
    # TRL computes this divergence only in 32 bits and less, and the smoothing of exo_pair.
    single = options.get("f_divergence_type") == "alpha_divergence"
    dtype = torch.float32 if single else torch.float64
    single = single or options.get("loss_type") == "exo_pair"
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if single else {"rtol": 1e-9, "atol": 1e-10}
    for name, mask in masks(6):
        tokens = random_tokens(mask).to(dtype)
        loss, metrics = our_dpo(tokens, **options)
        expected, trl_metrics = trl_own.dpo(tokens, **options)
        assert loss.isfinite() and gradients(loss, tokens.log_probs)[0].isfinite().all()
        if "sft" in str(options) and name == "all ignored":
            continue  # TRL has the mean of nothing, NaN
        assert_same(loss, expected, tokens.log_probs, **tolerance)
        assert_metrics(metrics, trl_metrics)


@gathered(
    pairwise(
        lambda loss_type, f_divergence_type: (
            f_divergence_type == "reverse_kl" or loss_type in OF_ANY_DIVERGENCE
        ),
        lambda loss_type, use_weighting: not use_weighting or loss_type not in UNWEIGHTED,
        lambda loss_type, label_smoothing: loss_type != "exo_pair" or label_smoothing > 0,
        loss_type=DPO_LOSS_TYPES,
        beta=[0.1, 0.7],
        label_smoothing=[0.0, 0.2],
        f_divergence_type=DIVERGENCES,
        ld_alpha=[None, 0.0, 0.3],
        use_weighting=[False, True],
    )
)
def test_every_pair_of_options_equals_trl(options: dict[str, Any]) -> None:
    check_dpo(options)


def test_several_losses_and_numbers_of_single_ones_equal_trl() -> None:
    for options in (
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
        {"loss_type": ["hinge", "sft"]},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.7},
        {"loss_type": "discopop", "discopop_tau": 0.2},
    ):
        check_dpo(options)


def test_kto_equals_trl() -> None:
    every = [
        {},
        {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        {"loss_type": "apo_zero_unpaired", "undesirable_weight": 2.0},
    ]
    for options in every:
        for _, mask in masks(5):
            tokens = random_tokens(mask)
            other = random_tokens(mask.roll(1, 0), seed=1)
            for label in (torch.arange(len(mask)) % 2 == 0, torch.ones(len(mask)).bool()):
                kl = kto_kl(other.log_probs, other.ref, other.mask)
                loss, metrics = kto_loss(tokens.log_probs, tokens.ref, mask, label, kl, **options)
                expected, trl_metrics = trl_own.kto(tokens, other, label, **options)
                assert_same(loss, expected, tokens.log_probs)
                both = metrics.keys() & trl_metrics.keys()
                assert_metrics({name: metrics[name] for name in both}, trl_metrics)


def test_what_is_refused() -> None:
    tokens = random_tokens(next(masks(4))[1])
    for options, fault in (
        ({"loss_type": "dpo"}, "loss_type: 'dpo' is not known"),
        ({"loss_type": []}, "loss_type: the list is empty"),
        ({"beta": float("inf")}, "beta: must be a finite number above 0"),
        ({"loss_type": ["sigmoid"], "loss_weights": [1.0, 2.0]}, "2 weights are given for 1"),
        ({"loss_type": "exo_pair"}, "exo_pair needs more than 0"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau: must be more than 0"),
        ({"loss_type": "aot", "use_weighting": True}, "sorts the pairs"),
        ({"f_divergence_type": "kl"}, "f_divergence_type: 'kl' is not known"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "nca_pair is only defined"),
    ):
        with pytest.raises(ConfigError, match=fault):
            our_dpo(tokens, **options)
    given, one = (tokens.log_probs, tokens.ref, tokens.mask), torch.ones(4)
    assert_refused(
        ("log_sum_sq_probs is needed", lambda: dpo_loss(*given, use_weighting=True)),
        ("3 rows; expected the chosen", lambda: dpo_loss(*(x[:3] for x in given))),
        (r"ref_log_probs: .* \(4,\)", lambda: dpo_loss(given[0], tokens.ref.sum(1), given[2])),
        (r"label: the shape is \(2,\)", lambda: kto_loss(*given, one[:2])),
        (r"kl: the shape is \(4,\)", lambda: kto_loss(*given, one, one)),
    )


def test_discopop_of_a_pair_that_is_far_off() -> None:
    log_probs = torch.tensor([[-2000.0], [-1.0]], requires_grad=True)
    reference, mask = torch.full((2, 1), -1.0), torch.ones(2, 1, dtype=torch.bool)
    loss = dpo_loss(log_probs, reference, mask, loss_type="discopop").loss
    torch.testing.assert_close(loss, torch.tensor(199.9))
    torch.testing.assert_close(gradients(loss, log_probs)[0], torch.tensor([[-0.1], [0.1]]))
