"""Parts that the losses share: sums over tokens, divisors, means over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import ConfigError


@dataclass(frozen=True)
class Mean:
    """A mean as a sum and a count. Over micro-batches and ranks, add them: `a + b`."""

    total: Tensor
    count: Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Tensor:
        """The mean, a scalar on the device of the loss; 0 if nothing was counted."""
        return self.total / self.count.clamp(min=1)


class LossOutput(NamedTuple):
    """The result of every loss. The metrics have TRL's names, and no gradients."""

    loss: Tensor  # scalar
    metrics: dict[str, Mean]


def mean_of(values: Tensor, mask: Tensor | None = None) -> Mean:
    """Return the mean of the values as a metric, or of those where the mask is true."""
    values = values.detach()
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    mask = mask.bool().expand_as(values)
    return Mean(torch.where(mask, values, 0.0).sum(), mask.sum())


def counted(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return the values with `fill` where the mask is false.

    Values that do not count may be infinite or NaN. They are replaced before anything is computed
    from them: a mask after the formula would be too late for backward, where 0 times infinity is
    NaN.

    Args: values: of the mask's shape; those of another shape, one for each row, stay as they are.
    """
    return torch.where(mask.bool(), values, fill) if values.shape == mask.shape else values


def token_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each row over the tokens of the mask: (batch, seq) -> (batch)."""
    return torch.where(mask.bool(), values, 0.0).sum(-1)


def token_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row over the tokens of the mask, 0 if it has none."""
    return token_sums(values, mask) / lengths(mask)


def lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens of each row, at least 1: (batch, seq) -> (batch)."""
    return mask.bool().sum(-1).clamp(min=1)


def divided(total: Tensor, normalizer: float | Tensor | None, count: float | Tensor) -> Tensor:
    """Return total / normalizer. Without a normalizer, the count of this batch takes its place.

    A divisor of 0 counts as 1, so a batch in which nothing counts has the loss 0.
    """
    divisor = count if normalizer is None else normalizer
    if not isinstance(divisor, Tensor):
        return total / (divisor or 1)
    return total / torch.where(divisor == 0, 1, divisor).to(total.dtype)


def halves(rows: Tensor) -> Tensor:
    """Split a batch of pairs, chosen completions first: (2 * pairs, ...) -> (2, pairs, ...).

    Raises:
        ConfigError: the number of rows is odd.
    """
    if len(rows) % 2:
        raise ConfigError(
            f"{len(rows)} rows; expected the chosen completions and then as many rejected"
        )
    return rows.unflatten(0, (2, len(rows) // 2))


def smoothed_nll(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return -log sigmoid of the logits; a share of the labels is taken as flipped."""
    kept = -F.logsigmoid(logits) * (1 - label_smoothing)
    return kept - F.logsigmoid(-logits) * label_smoothing


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ConfigError if an option is none of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not known; expected one of {', '.join(choices)}")


def check_beta(beta: float) -> None:
    """Raise ConfigError unless beta is a finite number above 0."""
    if not 0 < beta < math.inf:
        raise ConfigError(f"beta: must be a finite number above 0: {beta}")


def check_shape(name: str, tensor: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raise ConfigError if a tensor has none of the shapes; None has any.

    Broadcasting would turn a wrong shape into a wrong number.
    """
    if tensor is not None and tensor.shape not in shapes:
        expected = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ConfigError(f"{name}: the shape is {tuple(tensor.shape)}; expected {expected}")


def check_shapes(mask: Tensor, **tensors: Tensor | None) -> None:
    """Raise ConfigError unless the mask is (batch, seq), and the tensors have its shape."""
    if mask.dim() != 2:
        raise ConfigError(f"mask: the shape is {tuple(mask.shape)}; expected (batch, seq)")
    for name, tensor in tensors.items():
        check_shape(name, tensor, mask.shape)


def token_metrics(
    mask: Tensor,
    *,
    entropy: Tensor | None = None,
    correct: Tensor | None = None,
    mean_logits: Tensor | None = None,
    paired: bool = False,
) -> dict[str, Mean]:
    """Return the metrics that depend on the head's token outputs alone.

    Args:
        mask: (batch, seq), the tokens that count.
        entropy, correct, mean_logits: (batch, seq) each, or None for no metric.
        paired: whether the first half of the rows are chosen completions, and the others rejected.
            The accuracy then counts only the chosen ones, and the logits get two means.
    Returns: "entropy", "mean_token_accuracy", "logits/chosen" and "logits/rejected".
    """
    metrics = {}
    if entropy is not None:
        metrics["entropy"] = mean_of(entropy, mask)
    if correct is not None:
        counted = len(mask) // 2 if paired else len(mask)
        metrics["mean_token_accuracy"] = mean_of(correct[:counted].float(), mask[:counted])
    if mean_logits is not None and paired:
        for name, logits, tokens in zip(("chosen", "rejected"), halves(mean_logits), halves(mask)):
            metrics[f"logits/{name}"] = mean_of(logits, tokens)
    return metrics


def pair_metrics(rewards: Tensor, logps: Tensor) -> dict[str, Mean]:
    """Return the metrics of pairs from their rewards and log-probabilities, (2, pairs) each."""
    chosen, rejected = rewards
    return {
        "rewards/chosen": mean_of(chosen),
        "rewards/rejected": mean_of(rejected),
        "rewards/accuracies": mean_of((chosen > rejected).to(rewards.dtype)),
        "rewards/margins": mean_of(chosen - rejected),
        "logps/chosen": mean_of(logps[0]),
        "logps/rejected": mean_of(logps[1]),
    }


SFT_LOSS_TYPES = ("nll", "dft", "focal")


def sft_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "nll",
    weights: Tensor | None = None,
    focal_gamma: float = 2.0,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the weighted mean of -log p over the tokens of the mask.

    Args:
        log_probs, mask: (batch, seq).
        loss_type: "nll" weights all tokens by 1; "dft" by p, without a gradient through it (Wu et
            al. 2025, arXiv 2508.05629); "focal" by (1 - p)^focal_gamma, with the gradient (Lin et
            al. 2017, arXiv 1708.02002).
        weights: (batch, seq), one more factor of each token, or (batch, 1), one of each row. They
            do not count in the normalizer.
        focal_gamma: the exponent of "focal".
        normalizer: the number of tokens of the whole step.
    Returns: the loss, and no metrics.
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    check_choice("loss_type", loss_type, SFT_LOSS_TYPES)
    check_shapes(mask, log_probs=log_probs)
    check_shape("weights", weights, mask.shape, (len(mask), 1))
    mask = mask.bool()
    log_probs = counted(log_probs, mask)
    losses = -log_probs
    if loss_type == "dft":
        losses = losses * log_probs.detach().exp()
    elif loss_type == "focal":
        # An exponent below 1 has an infinite slope at 0, which times 0 would be NaN.
        missed = (-torch.expm1(log_probs)).clamp(min=torch.finfo(log_probs.dtype).tiny)
        losses = losses * missed**focal_gamma
    if weights is not None:
        losses = losses * counted(weights, mask)
    # The loss of a log-probability of 0 is 0, except for rounding.
    total = torch.where(mask, losses, 0.0).sum()
    return LossOutput(divided(total, normalizer, mask.sum()), metrics={})
