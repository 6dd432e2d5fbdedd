"""Weightings of the next-token loss, over token log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.losses.terms import (
    LossOutput,
    check_choice,
    check_shape,
    check_shapes,
    counted,
    divided,
)

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
