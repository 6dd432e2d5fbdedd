"""Means that add up, sums over tokens, divisors, and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from ligermodels import losses
from ligermodels.errors import ConfigError
from ligermodels.losses import policy, preference
from ligermodels.losses.distillation import hidden_cosine
from ligermodels.losses.reference_free import CPO_LOSS_TYPES
from ligermodels.losses.terms import (
    Mean,
    check_shapes,
    divided,
    halves,
    mean_of,
    token_means,
    token_metrics,
    token_sums,
)
from ligermodels.losses.weighting import SFT_LOSS_TYPES


def test_means_add_up() -> None:
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    mask = torch.tensor([1, 0, 1])
    both = mean_of(values, mask) + mean_of(values)
    assert both.value == torch.tensor(16 / 5)
    assert not both.value.requires_grad
    assert float(mean_of(values, torch.zeros(3)).value) == 0
    assert float(Mean(torch.tensor(3.0), torch.tensor(2)).value) == 1.5


def test_masked_tokens_do_not_count_even_if_they_are_not_numbers() -> None:
    values = torch.tensor([[1.0, float("nan")], [2.0, 4.0], [float("inf"), 0.0]])
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])
    assert token_sums(values, mask).tolist() == [1.0, 6.0, 0.0]
    assert token_means(values, mask).tolist() == [1.0, 3.0, 0.0]


def test_divisors() -> None:
    total = torch.tensor(6.0)
    for normalizer, expected in (
        (None, 2.0),
        (2, 3.0),
        (0, 6.0),
        (torch.tensor(4), 1.5),
        (torch.tensor(0), 6.0),
        (torch.tensor(4.0, dtype=torch.float64), 1.5),
    ):
        found = divided(total, normalizer, 3)
        assert found.item() == expected and found.dtype == torch.float32


def test_metrics_of_tokens() -> None:
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    values = torch.tensor([[1.0, 3.0], [5.0, 100.0]])
    metrics = token_metrics(mask, entropy=values, correct=values > 2, mean_logits=values)
    assert {k: float(v.value) for k, v in metrics.items()} == {
        "entropy": 3.0,
        "mean_token_accuracy": pytest.approx(2 / 3),
    }
    metrics = token_metrics(mask, correct=values > 2, mean_logits=values, paired=True)
    assert {k: float(v.value) for k, v in metrics.items()} == {
        "mean_token_accuracy": 0.5,
        "logits/chosen": 2.0,
        "logits/rejected": 5.0,
    }
    assert token_metrics(mask) == {}


def test_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"log_probs: the shape is \(3,\); expected \(batch"):
        check_shapes(log_probs=torch.ones(3))
    with pytest.raises(ConfigError, match=r"mask: the shape is \(2, 1\), but that of log_probs"):
        check_shapes(log_probs=torch.ones(2, 3), ref=None, mask=torch.ones(2, 1))
    with pytest.raises(ConfigError, match="rows: 3 rows; expected the chosen"):
        halves(torch.ones(3), "rows")


Loss = Callable[..., Tensor | losses.LossOutput]


def masked_losses(rows: int = 4, seq: int = 5) -> Iterator[tuple[str, Loss, Tensor, list[str]]]:
    """Yield every loss of tokens: its name, itself, the tokens that count, and its tensors."""
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 1, 0]]).bool()
    tokens = ["log_probs", "old_log_probs", "ref_log_probs", "sampling_log_probs", "entropy"]
    for kind in policy.GRPO_LOSS_TYPES:
        for level in policy.LEVELS:
            options = {"loss_type": kind, "importance_sampling_level": level, "mask": mask}
            options |= {"epsilon_high": 0.3, "beta": 0.1, "entropy_coef": 0.1, "delta": 1.5}
            options |= {"off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.7}
            options |= {"max_completion_length": seq}
            both = [*tokens, "advantages", "importance_sampling_ratio"]
            yield f"grpo {kind} {level}", partial(losses.grpo_loss, **options), mask, both
    rloo = partial(losses.rloo_loss, advantages=torch.tensor([1.0, -1.0, 0.5, 2.0]), mask=mask)
    yield "rloo", rloo, mask, ["log_probs", "old_log_probs", "entropy"]
    for mode in policy.RATIO_MODES:
        ratio = partial(losses.importance_ratio, mask=mask, mode=mode)
        yield mode, ratio, mask, ["old_log_probs", "sampling_log_probs"]
    for kind in SFT_LOSS_TYPES:
        sft = partial(losses.sft_loss, mask=mask, loss_type=kind)
        yield f"sft {kind}", sft, mask, ["log_probs", "weights"]
    for kind in preference.DPO_LOSS_TYPES:
        options = {"mask": mask, "loss_type": kind, "label_smoothing": 0.1, "ld_alpha": 0.5}
        options["use_weighting"] = not kind.startswith("aot")
        pairs = ["log_probs", "ref_log_probs", "log_sum_sq_probs"]
        yield f"dpo {kind}", partial(losses.dpo_loss, **options), mask, pairs
    label = torch.tensor([True, False, True, False])
    for kind in preference.KTO_LOSS_TYPES:
        kto = partial(losses.kto_loss, mask=mask, label=label, loss_type=kind)
        yield f"kto {kind}", kto, mask, ["log_probs", "ref_log_probs"]
    yield "kto_kl", partial(losses.kto_kl, mask=mask), mask, ["log_probs", "ref_log_probs"]
    yield "orpo", partial(losses.orpo_loss, mask=mask), mask, ["log_probs"]
    for kind in CPO_LOSS_TYPES:
        cpo = partial(losses.cpo_loss, mask=mask, loss_type=kind)
        yield f"cpo {kind}", cpo, mask, ["log_probs"]
    pair = partial(losses.bradley_terry_loss, mask=mask, center_rewards_coefficient=0.1)
    yield "reward", pair, mask, ["chosen", "rejected", "margin"]
    labels = torch.where(mask, 1, -100)
    process = partial(losses.token_reward_loss, labels=labels)
    yield "process reward", process, mask, ["rewards"]
    cosine = partial(hidden_cosine, targets=labels)
    yield "cosine", cosine, mask, ["hidden", "teacher_hidden"]


CONSTANT = "old_log_probs ref_log_probs sampling_log_probs log_sum_sq_probs teacher_hidden".split()
CONSTANT += ["advantages", "importance_sampling_ratio"]
each_loss = pytest.mark.parametrize("case", list(masked_losses()), ids=lambda case: case[0])


def random_values(mask: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Return tensors of a loss by their names."""
    generator = torch.Generator().manual_seed(0)
    width = (3,) if "hidden" in names else ()
    whole = {
        name: torch.rand(*mask.shape, *width, generator=generator, dtype=torch.float64)
        * (-1 if "log_probs" in name else 1)
        for name in names
    }
    if "advantages" in whole:
        whole["advantages"] -= 0.5
    return whole


@each_loss
def test_only_the_trained_model_gets_a_gradient(case: tuple[str, Loss, Tensor, list[str]]) -> None:
    """A reference, a teacher, an older policy and a critic get none, even if they require one."""
    _, loss, mask, names = case
    given = {name: x.requires_grad_() for name, x in random_values(mask, names).items()}
    made = loss(**given)
    total = made.loss if isinstance(made, losses.LossOutput) else made.sum()
    if total.requires_grad:
        total.backward()
        assert given[next(name for name in names if name not in CONSTANT)].grad is not None
    assert {name for name in CONSTANT if name in given and given[name].grad is not None} == set()


@each_loss
def test_nothing_beside_the_mask_is_looked_at(case: tuple[str, Loss, Tensor, list[str]]) -> None:
    """Loss, metrics and gradients are the same bit for bit, whatever stands there."""
    _, loss, mask, names = case
    width = (3,) if "hidden" in names else ()
    whole = random_values(mask, names)

    def found(**changed: Tensor) -> list[Tensor]:
        given = {name: x.clone().requires_grad_() for name, x in (whole | changed).items()}
        made = loss(**given)
        total, metrics = made if isinstance(made, losses.LossOutput) else (made.sum(), {})
        gradients = (
            torch.autograd.grad(
                total, list(given.values()), allow_unused=True, materialize_grads=True
            )
            if total.requires_grad
            else []
        )
        return [total, *gradients, *(mean.value for mean in metrics.values())]

    expected = found()
    for name, values in whole.items():
        for odd in (math.nan, math.inf, -math.inf):
            shown = mask.view(*mask.shape, *[1] * len(width))
            for one, other in zip(found(**{name: torch.where(shown, values, odd)}), expected):
                assert torch.equal(one, other), (name, odd)
