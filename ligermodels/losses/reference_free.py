"""Preference losses without a reference model, over token log-probabilities: ORPO, CPO and SimPO.

The names and the defaults of all options are those of `trl.experimental` 1.16. The layout of a
batch, the masks and the normalizers are those of `ligermodels.losses.preference`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.losses.terms import (
    LossOutput,
    Mean,
    check_beta,
    check_choice,
    check_shape,
    check_shapes,
    divided,
    halves,
    mean_of,
    pair_metrics,
    smoothed_nll,
    token_means,
    token_sums,
)

CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo")


def orpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    nll_mask: Tensor | None = None,
    beta: float = 0.1,
    normalizer: float | Tensor | None = None,
    token_normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the loss of odds ratio preference optimization, which has no reference model.

    It is the mean negative log-likelihood of the chosen rows, minus beta times the mean of log
    sigmoid(log odds ratio), where the probability of a completion is its geometric mean over tokens
    (Hong et al. 2024, arXiv 2403.07691, eq. 4 to 7). A pair with an empty completion has no odds,
    and adds 0 to the second mean.

    Args:
        log_probs: (2 * pairs, seq), not masked where `nll_mask` is true.
        mask: (2 * pairs, seq).
        nll_mask: (pairs, seq) or (2 * pairs, seq), of which the first half counts: the tokens of
            the likelihood. TRL counts those of the prompt as well. By default it is the mask.
        normalizer, token_normalizer: the number of pairs and the number of tokens of the chosen
            rows' likelihood in the whole step.
    Returns: the loss and the metrics of `dpo_loss`, nll_loss, log_odds_ratio and log_odds_chosen.
    Raises:
        ConfigError: a shape is wrong.
    """
    check_shapes(mask, log_probs=log_probs)
    logps = halves(token_means(log_probs, mask))
    nll, nll_mean = _chosen_nll(log_probs, mask if nll_mask is None else nll_mask, token_normalizer)
    complete = halves(mask.bool().any(-1)).all(0)
    log_odds = torch.where(complete, _logit(logps[0]) - _logit(logps[1]), 0.0)
    ratio = torch.where(complete, F.logsigmoid(log_odds), 0.0)
    loss = nll - beta * divided(ratio.sum(), normalizer, len(ratio))
    metrics = pair_metrics(beta * logps, logps)
    metrics |= {"log_odds_ratio": mean_of(ratio), "log_odds_chosen": mean_of(log_odds)}
    return LossOutput(loss, metrics | {"nll_loss": nll_mean})


def _logit(log_prob: Tensor) -> Tensor:
    """Return log(p / (1 - p)). A probability that is rounded to 1 counts as a little less."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    return log_prob - torch.log(-torch.expm1(log_prob))


def _chosen_nll(
    log_probs: Tensor, mask: Tensor, token_normalizer: float | Tensor | None
) -> tuple[Tensor, Mean]:
    """Return the negative log-likelihood per token of the chosen rows, as a loss and a metric."""
    chosen = halves(log_probs)[0]
    mask = mask[: len(chosen)].bool()
    check_shape("nll_mask", mask, chosen.shape)
    total = -token_sums(chosen, mask).sum()
    return divided(total, token_normalizer, mask.sum()), mean_of(-chosen, mask)


def cpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    cpo_alpha: float = 1.0,
    alpha: float = 0.0,
    normalizer: float | Tensor | None = None,
    token_normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the loss of contrastive preference optimization or of SimPO, without a reference.

    Args:
        log_probs, mask: (2 * pairs, seq).
        loss_type: "sigmoid" or "hinge" (Xu et al. 2024, arXiv 2401.08417), or "ipo" or "simpo"
            (Meng et al. 2024, arXiv 2405.14734), which take log-probabilities per token.
        simpo_gamma: the margin of simpo.
        cpo_alpha: the factor of the chosen completions' negative log-likelihood. SimPO takes 0.
        alpha: the exponent of AlphaPO's rewards (Gupta et al. 2025, arXiv 2501.03884); 0 takes the
            log-probabilities.
        normalizer, token_normalizer: the number of pairs and of chosen tokens of the whole step.
    Returns: the loss, the metrics of `dpo_loss` and nll_loss.
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    check_shapes(mask, log_probs=log_probs)
    check_choice("loss_type", loss_type, CPO_LOSS_TYPES)
    check_beta(beta)
    summed = token_means if loss_type in ("ipo", "simpo") else token_sums
    logps = halves(summed(log_probs, mask))
    rewards = -torch.expm1(-alpha * logps) / alpha if alpha else logps
    margin = rewards[0] - rewards[1]
    if loss_type == "hinge":
        losses = torch.relu(1 - beta * margin)
    elif loss_type == "ipo":
        losses = (margin - 1 / (2 * beta)) ** 2
    else:
        gamma = simpo_gamma if loss_type == "simpo" else 0.0
        losses = smoothed_nll(beta * margin - gamma, label_smoothing)
    nll, nll_mean = _chosen_nll(log_probs, mask, token_normalizer)
    loss = divided(losses.sum(), normalizer, len(losses))
    if cpo_alpha:
        loss = loss + cpo_alpha * nll
    return LossOutput(loss, pair_metrics(beta * rewards, logps) | {"nll_loss": nll_mean})
