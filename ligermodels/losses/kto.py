"""The KTO loss: completions that are desirable or not, without pairs, with a reference model.

The names and the defaults of all options are those of TRL 1.16. Log-probabilities, masks and
normalizers are those of `ligermodels.losses.preference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.losses.terms import (
    LossOutput,
    check_choice,
    check_shape,
    check_shapes,
    divided,
    mean_of,
    token_sums,
)

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


def kto_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Return KTO's estimate of the KL from the reference: the mean log ratio of other completions.

    Each prompt is paired with a completion of another prompt (Ethayarajh et al. 2024, arXiv
    2402.01306, section 4.2). The sum over micro-batches, clamped at 0, is what `kto_loss` takes.

    Args:
        log_probs, ref_log_probs, mask: (batch, seq).
        normalizer: the number of rows of the whole step.
    Returns: a scalar without a gradient, not clamped.
    """
    check_shapes(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    total = token_sums((log_probs - ref_log_probs).detach(), mask).sum()
    return divided(total, normalizer, len(mask))


def kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    label: Tensor,
    kl: float | Tensor = 0.0,
    *,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the loss of Kahneman-Tversky optimization, which needs no pairs.

    Args:
        log_probs, ref_log_probs, mask: (batch, seq).
        label: (batch) bool, whether the completion is a desirable one.
        kl: from `kto_kl`; below 0 it counts as 0. apo_zero_unpaired does not use it.
        loss_type: "kto" (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 7) or "apo_zero_unpaired"
            (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7).
        desirable_weight, undesirable_weight: factors of the two kinds of completions.
        normalizer: the number of completions of the whole step.
    Returns: the loss and the metrics rewards/chosen, rewards/rejected, logps/chosen, logps/rejected
        and kl. (TRL's rewards/margins is the difference of the first two.)
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    check_shapes(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    check_choice("loss_type", loss_type, KTO_LOSS_TYPES)
    check_shape("label", label, mask.shape[:1])
    if isinstance(kl, Tensor):
        check_shape("kl", kl, ())
    label = label.bool()
    logps = token_sums(log_probs, mask)
    log_ratio = logps - token_sums(ref_log_probs.detach(), mask)
    center = logps.new_zeros(()) if loss_type == "apo_zero_unpaired" else logps.new_ones(()) * kl
    center = center.detach().clamp(min=0)
    # 1 - sigmoid(x) is sigmoid(-x).
    signs = torch.where(label, -1.0, 1.0)
    losses = torch.sigmoid(signs * beta * (log_ratio - center))
    losses = torch.where(label, desirable_weight * losses, undesirable_weight * losses)
    metrics = {"kl": mean_of(center[None])}
    for name, rows in (("chosen", label), ("rejected", ~label)):
        metrics[f"rewards/{name}"] = mean_of(beta * log_ratio, rows)
        metrics[f"logps/{name}"] = mean_of(logps, rows)
    return LossOutput(divided(losses.sum(), normalizer, len(mask)), metrics)
