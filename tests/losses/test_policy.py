"""GRPO with all its options, RLOO, advantages: against TRL's own code and plain formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.losses.policy import (
    GRPO_LOSS_TYPES,
    RATIO_MODES,
    group_advantages,
    grpo_loss,
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
    gradients,
    masks,
    random_tokens,
)
from tests.pairwise import pairwise

LENGTH = 11  # max_completion_length
CISPO = {"loss_type": "cispo", "epsilon_high": 1.1}
BASES = [CISPO, *({"loss_type": name} for name in GRPO_LOSS_TYPES if name != "cispo")]
GRPO_OPTIONS = [
    *BASES,
    *(base | {"beta": 0.3} for base in BASES),
    *(base | {"importance_sampling_level": "sequence"} for base in BASES),
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"importance_sampling_level": "sequence", "loss_type": "luspo", "beta": 0.1},
    {"epsilon": 0.05, "epsilon_high": 0.1},
    {"delta": 1.15},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 0.5},
    {"top_entropy_quantile": 0.4},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.2, "loss_type": "grpo"},
    *(base | {"entropy_coef": 0.2} for base in BASES),
    *(base | {"off_policy_mask_threshold": 0.01} for base in BASES),
]


def ours(tokens, advantages, **options):
    given = {
        "old_log_probs": tokens.old,
        "ref_log_probs": tokens.ref,
        "sampling_log_probs": tokens.sampling,
        "entropy": tokens.entropy,
        "max_completion_length": LENGTH,
    }
    return grpo_loss(tokens.log_probs, advantages, tokens.mask, **given | options)


def some_advantages(rows: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([1.0, -0.7, 0.0, 0.4, -1.5, 2.0], dtype=dtype)[:rows]


def test_grpo_and_rloo_equal_trl() -> None:
    pytest.importorskip("trl", exc_type=ImportError)
    for _, mask in masks(6):
        tokens = random_tokens(mask)
        advantages = some_advantages(len(mask))
        extras: list[dict[str, Any]] = [{"old_log_probs": None}]
        for mode in RATIO_MODES:
            ratio = importance_ratio(tokens.old, tokens.sampling, mask, mode=mode)
            extras.append({"importance_sampling_ratio": ratio})
        every = [*GRPO_OPTIONS, extras[2] | {"beta": 0.2}]
        every += [base | extra for base in BASES for extra in extras]
        cases = [(advantages, options) for options in every]
        cases += [(tokens.ref + 1, base) for base in BASES]  # an advantage for each token
        made = [(ours(tokens, *x, **y), trl_own.grpo(tokens, *x, **y)) for *x, y in cases]
        more = {"old_log_probs": tokens.old, "entropy": tokens.entropy}
        for options in ({}, {"epsilon": 0.05, "epsilon_high": 0.4}):
            loss = rloo_loss(tokens.log_probs, advantages, mask, **more, **options)
            made.append((loss, trl_own.rloo(tokens, advantages, **options)))
        for (loss, metrics), (expected, trl_metrics) in made:
            assert_same(loss, expected, tokens.log_probs, tokens.entropy)
            assert_metrics(metrics, trl_metrics)


def test_group_advantages_equal_trl() -> None:
    pytest.importorskip("trl", exc_type=ImportError)
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
            ours(tokens, **given)
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


def plain_grpo(tokens: Tokens, advantages: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the loss of `grpo_loss` from its papers' formulas, completion by completion."""
    of = SimpleNamespace(**options)
    least = tokens.entropy.detach()[tokens.mask].quantile(1 - of.top_entropy_quantile)
    acting = tokens.entropy[tokens.mask & (tokens.entropy >= least)]
    total = torch.zeros((), dtype=torch.float64)
    for row, mask in enumerate(tokens.mask):
        log_p, ref, sampling, entropy = (
            x[row, mask] for x in (tokens.log_probs, tokens.ref, tokens.sampling, tokens.entropy)
        )
        old = log_p.detach() if of.old_log_probs is None else of.old_log_probs[row, mask]
        factor = torch.ones(1, dtype=torch.float64)
        if of.importance_sampling_ratio is not None:
            factor = of.importance_sampling_ratio[row]
            factor = factor[mask] if len(factor) > 1 else factor
        good = advantages[row]
        ratio = (log_p - old).exp()
        if of.importance_sampling_level == "sequence":
            ratio = ((log_p - old).sum() / len(log_p)).exp()
        if of.loss_type == "cispo":
            losses = -ratio.clamp(max=of.epsilon_high).detach() * good * log_p
        elif of.loss_type == "sapo":
            heat = 1.0 if good > 0 else 1.05
            losses = -4 / heat * torch.sigmoid(heat * (ratio - 1)) * good
        elif of.loss_type == "vespo":
            k, scale = (2.0, 3.0) if good >= 0 else (3.0, 2.0)
            weight = (log_p - old).detach().sum().exp() * factor.prod()
            losses = -(weight**k) * (scale * (1 - weight)).exp() * good * log_p
        else:
            clipped = ratio.clamp(0.98, 1 + (0.02 if of.epsilon_high is None else of.epsilon_high))
            kept = ratio if of.delta is None else ratio.clamp(max=of.delta)
            losses = -torch.min(kept * good, clipped * good)
        if of.off_policy_mask_threshold is not None and good < 0:
            losses = losses * ((sampling - log_p.detach()).mean() <= of.off_policy_mask_threshold)
        if of.top_entropy_quantile < 1:
            losses = losses * (entropy >= least)
        if of.loss_type != "vespo":
            losses = losses * factor
        kl = (ref - log_p).exp() - (ref - log_p) - 1
        losses = losses + of.beta * kl * (ratio if of.use_bias_correction_kl else 1)
        losses = losses.expand(len(log_p))
        total = total + (losses.mean() if of.loss_type in ("grpo", "sapo") else losses.sum())
    count = tokens.mask.sum()
    if of.loss_type in ("grpo", "sapo", "luspo", "dr_grpo"):
        count = len(tokens.mask) * (LENGTH if of.loss_type == "dr_grpo" else 1)
    return total / (of.normalizer or count) - of.entropy_coef * acting.mean()


@gathered(
    pairwise(
        lambda loss_type, epsilon_high: (epsilon_high == 1.02) == (loss_type == "cispo"),
        lambda has_old, epsilon_high: (
            has_old or epsilon_high is None
        ),  # without, no ratio is clipped
        lambda has_old, delta: has_old or delta is None,
        loss_type=GRPO_LOSS_TYPES,
        importance_sampling_level=["token", "sequence"],
        beta=[0.0, 0.3],
        use_bias_correction_kl=[True, False],
        delta=[None, 1.03],
        epsilon_high=[None, 0.05, 1.02],
        has_old=[True, False],
        correction=[None, "token_truncate", "sequence_truncate"],
        off_policy_mask_threshold=[None, 0.01],
        top_entropy_quantile=[1.0, 0.37],
        entropy_coef=[0.0, 0.2],
        normalizer=[None, 7.0],
    )
)
def test_every_pair_of_options_equals_the_plain_formula(options: dict[str, Any]) -> None:
    options, tokens = dict(options), random_tokens(next(masks(6))[1])
    mode = options.pop("correction")
    options["old_log_probs"] = tokens.old if options.pop("has_old") else None
    options["importance_sampling_ratio"] = None
    if mode is not None:
        ratio = importance_ratio(tokens.old, tokens.sampling, tokens.mask, mode=mode)
        options["importance_sampling_ratio"] = ratio
    loss = ours(tokens, some_advantages(6), epsilon=0.02, **options).loss
    exact = plain_grpo(tokens, some_advantages(6), **options)
    torch.testing.assert_close(loss, exact)
    leaves = tokens.log_probs, tokens.entropy
    torch.testing.assert_close(gradients(loss, *leaves), gradients(exact, *leaves))
