"""Losses of reward models: over one reward of each completion, or one of each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.losses.terms import LossOutput, check_shape, counted, divided, mean_of


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    mask: Tensor | None = None,
    *,
    margin: Tensor | None = None,
    center_rewards_coefficient: float | None = None,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the negative log-likelihood that the chosen completions win, in Bradley-Terry's model.

    -log sigmoid(chosen - rejected - margin), with the margin of Touvron et al. 2023 (Llama 2, arXiv
    2307.09288, eq. 2) and the centring of Eisenstein et al. 2023 (arXiv 2312.09244, eq. 2). Options
    have the names of TRL 1.16.

    Args:
        chosen, rejected: (pairs), or (pairs, seq) for one reward of each token.
        mask: of the same shape, the pairs or tokens that count; by default all.
        margin: (pairs), or of the rewards' shape: by how much the chosen one should win.
        center_rewards_coefficient: the weight of (chosen + rejected)^2, which keeps rewards near 0.
        normalizer: the number of pairs (or tokens) of the whole step.
    Returns: the loss and the metrics accuracy, margin and mean_reward.
    Raises:
        ConfigError: a shape is wrong.
    """
    check_shape("rejected", rejected, chosen.shape)
    check_shape("mask", mask, chosen.shape)
    mask = torch.ones_like(chosen, dtype=torch.bool) if mask is None else mask.bool()
    chosen, rejected = counted(chosen, mask), counted(rejected, mask)
    difference = beyond = chosen - rejected
    if margin is not None:
        check_shape("margin", margin, chosen.shape, chosen.shape[:1])
        margin = margin.view(*margin.shape, *[1] * (chosen.dim() - margin.dim()))
        beyond = difference - counted(margin, mask)
    losses = -F.logsigmoid(beyond)
    if center_rewards_coefficient is not None:
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    metrics = {
        "accuracy": mean_of((difference > 0).to(losses.dtype), mask),
        "margin": mean_of(difference, mask),
        "mean_reward": mean_of(chosen, mask) + mean_of(rejected, mask),
    }
    total = torch.where(mask, losses, 0.0).sum()
    return LossOutput(divided(total, normalizer, mask.sum()), metrics)


def token_reward_loss(
    rewards: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the binary cross entropy of a process reward model.

    Lightman et al. 2023, arXiv 2305.20050: each step of a solution is labelled right or wrong, at
    the token where it ends.

    Args:
        rewards: (batch, seq), the logits of "right".
        labels: (batch, seq), 1 for right, 0 for wrong (or the probability of right), ignore_index
            at all other tokens.
        normalizer: the number of labelled tokens of the whole step.
    Returns: the loss and the metric accuracy.
    Raises:
        ConfigError: a shape is wrong; or a label is not in [0, 1], on a CPU in eager mode. On a GPU
            it makes the loss NaN.
    """
    check_shape("labels", labels, rewards.shape)
    mask = labels != ignore_index
    known = ~mask | ((labels >= 0) & (labels <= 1))
    on_cpu = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and not known.all():
        odd = labels[~known][0].item()
        raise ConfigError(f"labels: {odd}; expected 0 to 1, or ignore_index={ignore_index}")
    rewards = counted(rewards, mask)
    targets = torch.where(mask, labels, 0).to(rewards.dtype).masked_fill(~known, torch.nan)
    losses = F.binary_cross_entropy_with_logits(rewards, targets, reduction="none")
    right = ((rewards > 0) == (targets > 0.5)).to(rewards.dtype)
    loss = divided(torch.where(mask, losses, 0.0).sum(), normalizer, mask.sum())
    return LossOutput(loss, {"accuracy": mean_of(right, mask)})
