"""GRPO with all its options, RLOO, advantages: against TRL's own code and plain formulas."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.losses.policy import (
    GRPO_LOSS_TYPES,
    RATIO_MODES,
    group_advantages,
    importance_ratio,
    rloo_advantages,
    rloo_loss,
)
from tests.losses import trl_own
from tests.losses.batches import (
    Tokens,
    assert_metrics,
    assert_refused,
    assert_same,
    gathered,
    masks,
    policy_loss,
    random_tokens,
    some_advantages,
)
from tests.pairwise import pairwise


@gathered(
    pairwise(
        lambda loss_type, epsilon_high: (epsilon_high == 1.02) == (loss_type == "cispo"),
        loss_type=GRPO_LOSS_TYPES,
        importance_sampling_level=["token", "sequence"],
        beta=[0.0, 0.3],
        use_bias_correction_kl=[True, False],
        delta=[None, 1.03],
        epsilon_high=[None, 0.05, 1.02],
        old=["given", "none"],
        correction=[None, *RATIO_MODES],
        off_policy_mask_threshold=[None, 0.01],
        top_entropy_quantile=[1.0, 0.37],
        entropy_coef=[0.0, 0.2],
        own=["row", "token"],  # an advantage
    )
)
def test_every_pair_of_options_equals_trl(options: dict[str, Any]) -> None:
    for _, mask in masks(6):
        given, tokens = {"epsilon": 0.02, **options}, random_tokens(mask)
        advantages = tokens.ref + 1 if given.pop("own") == "token" else some_advantages(len(mask))
        if given.pop("old") == "none":
            given["old_log_probs"] = None
        if (mode := given.pop("correction")) is not None:
            ratio = importance_ratio(tokens.old, tokens.sampling, mask, mode=mode)
            given["importance_sampling_ratio"] = ratio
        check(
            policy_loss(tokens, advantages, **given),
            trl_own.grpo(tokens, advantages, **given),
            tokens,
        )


def check(found: Any, expected: tuple[torch.Tensor, dict[str, float]], tokens: Tokens) -> None:
    assert_same(found.loss, expected[0], tokens.log_probs, tokens.entropy)
    assert_metrics(found.metrics, expected[1])


def test_numbers_of_single_losses_equal_trl() -> None:
    """Also without entropies, of which the loss then has no metric."""
    for (_, mask), has_entropy in product(masks(6), (True, False)):
        tokens, advantages = random_tokens(mask), some_advantages(len(mask))
        more = {"old_log_probs": tokens.old, "entropy": tokens.entropy if has_entropy else None}
        for options in (
            {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
            {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
        ):
            expected = trl_own.grpo(tokens, advantages, **options)
            check(policy_loss(tokens, advantages, **more, **options), expected, tokens)
        for options in ({}, {"epsilon": 0.05, "epsilon_high": 0.4}):
            found = rloo_loss(tokens.log_probs, advantages, mask, **more, **options)
            check(found, trl_own.rloo(tokens, advantages, **options), tokens)


def test_group_advantages_equal_trl() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(12, generator=generator)
    several = torch.randn(12, 3, generator=generator)
    several[0, 1] = several[5] = several[7, 0] = math.nan
    several[8:] = 0.5
    weights = torch.tensor([1.0, 0.5, 2.0])
    for rewards in (plain, several):
        given = {} if rewards is plain else {"reward_weights": weights}
        for way in ("sum_then_normalize", "normalize_then_sum"):
            for scale in ("group", "batch", "none"):
                options = given | {"scale_rewards": scale, "multi_objective_aggregation": way}
                torch.testing.assert_close(
                    group_advantages(rewards, 4, **options),
                    trl_own.advantages("grpo", rewards, 4, **options),
                )
        kl = torch.rand(12, generator=generator)
        for more in (
            {},
            {"beta": 0.3, "kl": kl},
            {"normalize_advantages": True, "reward_clip_range": (-0.5, 0.4)},
        ):
            defaults = {"beta": 0.0, "normalize_advantages": False, "reward_clip_range": None}
            torch.testing.assert_close(
                rloo_advantages(rewards, 4, **given, **more),
                trl_own.advantages("rloo", rewards, 4, **given, **defaults | more),
            )


def test_importance_ratio() -> None:
    old = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    sampled = torch.tensor([[-2.5, -2.0, math.nan], [-0.5, math.nan, -1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    big, small = math.exp(1.5), math.exp(-0.5)
    expected = {
        "token_truncate": [[3.0, 1.0, 1.0], [small, 1.0, 1.0]],
        "token_mask": [[0.0, 1.0, 1.0], [small, 1.0, 1.0]],
        "sequence_truncate": [[3.0], [small]],
        "sequence_mask": [[0.0], [small]],
    }
    for mode, values in expected.items():
        found = importance_ratio(old, sampled, mask, mode=mode)
        torch.testing.assert_close(found, torch.tensor(values))
    low = importance_ratio(old, sampled, mask, mode="token_mask", clip_min=0.9, clip_max=None)
    torch.testing.assert_close(low, torch.tensor([[big, 1.0, 1.0], [0.0, 1.0, 1.0]]))


def test_what_is_refused() -> None:
    tokens = random_tokens(next(masks(6))[1])
    for options, fault in (
        ({"loss_type": "ppo"}, "loss_type: 'ppo' is not known"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level: 'row' is not known"),
        ({"beta": 0.1, "ref_log_probs": None}, "ref_log_probs: beta is not 0"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "dr_grpo divides by it"),
        ({"loss_type": "cispo"}, "epsilon_high: cispo needs it"),
        ({"entropy_coef": 0.1, "entropy": None}, "entropy_coef and top_entropy_quantile"),
        # None of these may broadcast: it would be a wrong number without an error.
        ({"importance_sampling_ratio": torch.ones(6)}, r"importance_sampling_ratio: .* \(6,\)"),
        ({"advantages": some_advantages(5)}, r"advantages: the shape is \(5,\)"),
    ):
        given = {"advantages": some_advantages(6)} | options
        with pytest.raises(ConfigError, match=fault):
            policy_loss(tokens, **given)
    six = torch.ones(6)
    weights = {"reward_weights": six}
    assert_refused(
        (r"advantages: the shape is \(6, 7\)", lambda: rloo_loss(*tokens[:2], tokens.mask)),
        ("num_generations: 4 for 6 rewards", lambda: group_advantages(six, 4)),
        ("kl: beta is not 0", lambda: rloo_advantages(six, 3, beta=0.1)),
        (r"kl: .*\(6, 1\)", lambda: rloo_advantages(six, 3, beta=0.1, kl=six[:, None])),
        ("reward_weights: the shape", lambda: group_advantages(six, 3, **weights)),
        ("reward_weights: the shape is", lambda: rloo_advantages(six, 3, **weights)),
        ("mode: 'none'", lambda: importance_ratio(*tokens[:2], tokens.mask, mode="none")),
    )
