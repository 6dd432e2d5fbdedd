"""What holds for every loss of tokens: masks, precision, and sums over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligermodels import losses
from ligermodels.losses import kto, policy, preference
from ligermodels.losses.preference import CPO_LOSS_TYPES
from ligermodels.losses.terms import SFT_LOSS_TYPES

Loss = Callable[..., Tensor | losses.LossOutput]
MASK = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 1, 0]]).bool()
LABEL, ADVANTAGES = torch.tensor([True, False, True, False]), torch.tensor([1.0, -1.0, 0.5, 2.0])
# The batch, and its micro-batches: rows i and i + 2 are a pair.
WHOLE, PARTS = [0, 1, 2, 3], ([0, 2], [1, 3])
# What is a property of a batch, so that micro-batches differ from it.
OF_A_BATCH = ("aot", "aot_unpaired")


class Case(NamedTuple):
    name: str
    loss: Loss
    tensors: list[str]  # what it is given for each token
    by_batch: dict[str, object] = {}  # options that make it a sum over micro-batches


def masked_losses(rows: list[int] = WHOLE) -> Iterator[Case]:
    """Yield every loss of tokens, for some rows of the batch, with the counts of all rows."""
    mask, count, pairs = MASK[rows], MASK.sum(), {"normalizer": 2}
    tokens = ["log_probs", "old_log_probs", "ref_log_probs", "sampling_log_probs", "entropy"]
    for kind, level in product(policy.GRPO_LOSS_TYPES, policy.LEVELS):
        options = {"loss_type": kind, "importance_sampling_level": level, "mask": mask}
        options |= {"epsilon_high": 0.3, "beta": 0.1, "entropy_coef": 0.1, "delta": 1.5}
        options |= {"off_policy_mask_threshold": 0.1, "max_completion_length": 5}
        options["normalizer"] = losses.grpo_normalizer(MASK, kind, 5)
        both = [*tokens, "advantages", "importance_sampling_ratio"]
        loss = partial(losses.grpo_loss, **options, token_normalizer=count)
        yield Case(f"grpo {kind} {level}", loss, both)
    loss = partial(losses.grpo_loss, mask=mask, entropy_coef=0.1, top_entropy_quantile=0.7)
    yield Case("grpo quantile", loss, [*tokens, "advantages"], {"top_entropy_quantile": 1.0})
    rloo = partial(losses.rloo_loss, advantages=ADVANTAGES[rows], mask=mask, normalizer=4)
    yield Case("rloo", rloo, ["log_probs", "old_log_probs", "entropy"])
    for mode in policy.RATIO_MODES:
        ratio = partial(losses.importance_ratio, mask=mask, mode=mode)
        yield Case(mode, ratio, ["old_log_probs", "sampling_log_probs"])
    for kind in SFT_LOSS_TYPES:
        sft = partial(losses.sft_loss, mask=mask, loss_type=kind, normalizer=count)
        yield Case(f"sft {kind}", sft, ["log_probs", "weights"])
    chosen = {**pairs, "token_normalizer": MASK[:2].sum(), "mask": mask}
    for kind in preference.DPO_LOSS_TYPES:
        options = chosen | {"loss_type": kind, "label_smoothing": 0.1, "ld_alpha": 0.5}
        options["use_weighting"] = not kind.startswith("aot")
        names = ["log_probs", "ref_log_probs", "log_sum_sq_probs"]
        yield Case(kind, partial(losses.dpo_loss, **options), names)
    for kind in kto.KTO_LOSS_TYPES:
        options = {"mask": mask, "label": LABEL[rows], "loss_type": kind, "normalizer": 4}
        yield Case(kind, partial(losses.kto_loss, **options), ["log_probs", "ref_log_probs"])
    kl = partial(losses.kto_kl, mask=mask, normalizer=4)
    yield Case("kto_kl", kl, ["log_probs", "ref_log_probs"])
    yield Case("orpo", partial(losses.orpo_loss, **chosen), ["log_probs"])
    for kind in CPO_LOSS_TYPES:
        yield Case(kind, partial(losses.cpo_loss, **chosen, loss_type=kind), ["log_probs"])
    options = {"mask": mask, "center_rewards_coefficient": 0.1, "normalizer": count}
    pair = partial(losses.bradley_terry_loss, **options)
    yield Case("reward", pair, ["chosen", "rejected", "margin"])
    labels = torch.where(mask, 1, -100)
    process = partial(losses.token_reward_loss, labels=labels, normalizer=count)
    yield Case("process reward", process, ["rewards"])


CONSTANT = "old_log_probs ref_log_probs sampling_log_probs log_sum_sq_probs".split()
CONSTANT += ["advantages", "importance_sampling_ratio"]
each_loss = pytest.mark.parametrize("case", list(masked_losses()), ids=lambda case: case.name)


def random_values(names: list[str]) -> dict[str, Tensor]:
    """Return tensors of a loss by their names."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.rand(*MASK.shape, generator=generator, dtype=torch.float64)
        * (-1 if "log_probs" in name else 1)
        for name in names
    }
    if "advantages" in whole:
        whole["advantages"] -= 0.5
    return whole


def results(case: Case, given: dict[str, Tensor], *leaves: Tensor, **options: Any) -> list[Tensor]:
    """Return the loss, the gradients of the leaves, then the metrics' sums and their counts."""
    made = case.loss(**given, **options)
    total, metrics = made if isinstance(made, losses.LossOutput) else (made.sum(), {})
    gradients: tuple[Tensor, ...] = ()
    if total.requires_grad:
        gradients = torch.autograd.grad(
            total, leaves, allow_unused=True, materialize_grads=True, retain_graph=True
        )
    means = metrics.values()
    return [total, *gradients, *(x.total for x in means), *(x.count for x in means)]


@each_loss
def test_nothing_beside_the_mask_is_looked_at(case: Case) -> None:
    """Loss, metrics and gradients are the same bit for bit, whatever stands there.

    A reference, a teacher, an older policy and a critic get no gradient, even if they require one.
    """
    whole = random_values(case.tensors)

    def found(**changed: Tensor) -> list[Tensor]:
        given = {name: x.clone().requires_grad_() for name, x in (whole | changed).items()}
        return results(case, given, *given.values())

    expected = found()
    if expected[0].requires_grad:
        trained = {name for name, grad in zip(whole, expected[1:]) if grad.any()}
        assert trained and trained.isdisjoint(CONSTANT)
    for name, values in whole.items():
        for odd in (math.nan, math.inf, -math.inf):
            shown = MASK.view(*MASK.shape, *[1] * (values.dim() - 2))
            for one, other in zip(found(**{name: torch.where(shown, values, odd)}), expected):
                assert torch.equal(one, other), (name, odd)


@each_loss
def test_float32_is_near_float64(case: Case) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        given = {
            name: x.to(dtype).requires_grad_() for name, x in random_values(case.tensors).items()
        }
        found.append(results(case, given, *given.values()))
    assert found[0][0].dtype == torch.float32
    for narrow, wide in zip(*found):
        torch.testing.assert_close(narrow.double(), wide.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(len(list(masked_losses()))))
def test_micro_batches_add_up_to_the_batch(number: int) -> None:
    """Their losses, gradients and metrics do, with the counts of the whole batch."""
    case = list(masked_losses())[number]
    if case.name in OF_A_BATCH or case.name in policy.RATIO_MODES:
        return
    given = {name: x.requires_grad_() for name, x in random_values(case.tensors).items()}
    whole = results(case, given, *given.values(), **case.by_batch)
    counts = {"normalizer": MASK.sum(), "token_normalizer": MASK.sum()} if case.by_batch else {}
    parts = []
    for rows in PARTS:
        part, own = list(masked_losses(rows))[number], {k: x[rows] for k, x in given.items()}
        parts.append(results(part, own, *given.values(), **case.by_batch, **counts))
    assert len(whole) == len(parts[0])
    metrics = (len(whole) - 1 - (len(given) if whole[0].requires_grad else 0)) // 2
    sums = [sum(each) for each in zip(*parts)]
    for found, together in zip(sums[: len(sums) - 2 * metrics], whole):
        torch.testing.assert_close(found, together)
    for i in range(len(whole) - 2 * metrics, len(whole) - metrics):
        means = [x[i] / x[i + metrics].clamp(min=1) for x in (sums, whole)]
        torch.testing.assert_close(*means)
