"""Preference losses of pairs, over token log-probabilities: DPO and kin, ORPO, CPO and SimPO.

The last three have no reference model. The names and the defaults of all options are those of TRL
1.16 and its `trl.experimental`. A batch of pairs holds the chosen completions first and then the
rejected ones in the same order: rows i and pairs + i are a pair. All log-probabilities are
(batch, seq), as `LossHead.log_probs` returns them; the mask (batch, seq) is true at the tokens of
the completion. Only log_probs gets a gradient.

Each loss is a sum divided by a normalizer. By default this is the count of the batch. If a step has
several micro-batches or ranks, pass the count of the whole step; the sum over the micro-batches is
then the loss of one big batch. (DDP and FSDP average gradients: multiply by the number of ranks.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.losses.terms import (
    LossOutput,
    Mean,
    check_beta,
    check_choice,
    check_shape,
    check_shapes,
    divided,
    halves,
    lengths,
    mean_of,
    pair_metrics,
    smoothed_nll,
    token_means,
    token_sums,
)


@dataclass
class _Pairs:
    """The terms of DPO's formulas, and the formulas, which return one number per pair.

    The tensors are (2, pairs): those of the chosen completions first, then those of the rejected.
    """

    logps: Tensor  # log-probabilities of whole completions
    ref_logps: Tensor
    scores: Tensor  # f'(ratio) of the divergence; the log ratio itself for the reverse KL
    lengths: Tensor
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def rewards(self) -> Tensor:
        """The implicit rewards: beta times the log ratios of the policy to the reference."""
        return self.beta * (self.logps - self.ref_logps)

    @property
    def logits(self) -> Tensor:
        """The margin of the scores."""
        return self.beta * _margin(self.scores)

    def sigmoid(self) -> Tensor:
        """Rafailov et al. 2023, arXiv 2305.18290, eq. 7."""
        return -F.logsigmoid(self.logits)

    def hinge(self) -> Tensor:
        """Zhao et al. 2023 (SLiC), arXiv 2305.10425, Liu et al. 2023 (RSO), arXiv 2309.06657."""
        return torch.relu(1 - self.logits)

    def ipo(self) -> Tensor:
        """Azar et al. 2023, arXiv 2310.12036, eq. 17, with the log ratios per token as TRL does."""
        return (_margin(self.scores / self.lengths) - 1 / (2 * self.beta)) ** 2

    def exo_pair(self) -> Tensor:
        """Ji et al. 2024, arXiv 2402.00856, eq. 16: the KL from the smoothed label."""
        chosen, rejected = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        log_flipped, log_kept = math.log(self.label_smoothing), math.log1p(-self.label_smoothing)
        return chosen.exp() * (chosen - log_kept) + rejected.exp() * (rejected - log_flipped)

    def nca_pair(self) -> Tensor:
        """Chen et al. 2024, arXiv 2402.05369."""
        return -F.logsigmoid(self.rewards[0]) - 0.5 * F.logsigmoid(-self.rewards).sum(0)

    def robust(self) -> Tensor:
        """Chowdhury et al. 2024, arXiv 2403.00409, eq. 12: unbiased if labels are flipped."""
        rate = self.label_smoothing
        kept, flipped = -F.logsigmoid(self.logits), -F.logsigmoid(-self.logits)
        return ((1 - rate) * kept - rate * flipped) / (1 - 2 * rate)

    def bco_pair(self) -> Tensor:
        """Jung et al. 2024, arXiv 2404.04656, without its shift of the rewards."""
        return -F.logsigmoid(self.rewards[0]) - F.logsigmoid(-self.rewards[1])

    def sppo_hard(self) -> Tensor:
        """Wu et al. 2024, arXiv 2405.00675, eq. 4.7, with the probabilities 1 and 0 of a win."""
        chosen, rejected = self.logps - self.ref_logps
        return (chosen - 0.5 / self.beta) ** 2 + (rejected + 0.5 / self.beta) ** 2

    def aot(self) -> Tensor:
        """Melnyk et al. 2024, arXiv 2406.05882: the sorted margins of policy and reference.

        The pairs of this batch are sorted among each other.
        """
        policy, reference = (torch.sort(_margin(x)).values for x in (self.logps, self.ref_logps))
        return smoothed_nll(self.beta * (policy - reference), self.label_smoothing)

    def aot_unpaired(self) -> Tensor:
        """Compute `aot` without pairs, from the sorted log ratios of each kind of completion."""
        return smoothed_nll(_margin(torch.sort(self.rewards).values), self.label_smoothing)

    def apo_zero(self) -> Tensor:
        """D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7."""
        return torch.sigmoid(-self.rewards[0]) + torch.sigmoid(self.rewards[1])

    def apo_down(self) -> Tensor:
        """D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8."""
        return torch.sigmoid(self.rewards[0]) + torch.sigmoid(-_margin(self.rewards))

    def discopop(self) -> Tensor:
        """Lu et al. 2024, arXiv 2406.08414, eq. 5: a logistic and an exponential loss blended."""
        log_blend = F.logsigmoid(self.logits / self.discopop_tau)
        # As one power, because exp(-logits) alone is infinite where the blend is 0.
        exponential = torch.exp(log_blend - self.logits)
        return -F.logsigmoid(self.logits) * (1 - log_blend.exp()) + exponential

    def sigmoid_norm(self) -> Tensor:
        """Lambert et al. 2024 (Tülu 3), arXiv 2411.15124: DPO on log ratios per token."""
        return -F.logsigmoid(self.beta * _margin(self.scores / self.lengths))


def _margin(values: Tensor) -> Tensor:
    """Return what the chosen completions have more than the rejected: (2, pairs) -> (pairs)."""
    return values[0] - values[1]


# The names of the formulas above. The second ones do not depend on the margin alone, in which the
# partition function of another divergence cancels.
_ANY_DIVERGENCE = "sigmoid hinge ipo exo_pair robust discopop sigmoid_norm".split()
_REVERSE_KL = "nca_pair bco_pair sppo_hard aot aot_unpaired apo_zero apo_down".split()
# "sft" is no formula of pairs, because it is a mean over tokens: see dpo_loss.
DPO_LOSS_TYPES = (*_ANY_DIVERGENCE, *_REVERSE_KL, "sft")
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def dpo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    use_weighting: bool = False,
    log_sum_sq_probs: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    token_normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the loss of direct preference optimization, or a weighted sum of its relatives.

    Args:
        log_probs, ref_log_probs: (2 * pairs, seq), of the policy and of the reference model.
        mask: (2 * pairs, seq).
        loss_type: one of `DPO_LOSS_TYPES`, or several, weighted by `loss_weights` (1 each).
        beta: how strongly the policy is held to the reference, a finite number above 0.
        label_smoothing: the rate of flipped labels, for robust, exo_pair, aot and aot_unpaired.
        f_divergence_type, f_alpha_divergence_coef: the divergence from the reference (Wang et al.
            2023, arXiv 2309.16240), one of `DIVERGENCES`.
        ld_alpha: the weight of the tokens beyond the length of the shorter completion of the pair
            (Liu et al. 2024, arXiv 2409.06411).
        discopop_tau: the temperature of discopop, above 0.
        use_weighting, log_sum_sq_probs: whether each pair is weighted by its probability (Zhou et
            al. 2024, WPO, arXiv 2406.11827, eq. 2); then log sum_v p_v^2 of each token is needed,
            (2 * pairs, seq).
        normalizer: the number of pairs of the whole step.
        token_normalizer: the number of chosen completion tokens of the whole step, for "sft".
    Returns: the loss and the metrics rewards/chosen, rewards/rejected, rewards/accuracies,
        rewards/margins, logps/chosen and logps/rejected.
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    tokens = {"log_probs": log_probs, "ref_log_probs": ref_log_probs}
    check_shapes(mask, **tokens, log_sum_sq_probs=log_sum_sq_probs)
    types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    if not types:
        raise ConfigError(f"loss_type: the list is empty; expected {', '.join(DPO_LOSS_TYPES)}")
    for name in types:
        check_choice("loss_type", name, DPO_LOSS_TYPES)
    weights = [1.0] * len(types) if loss_weights is None else loss_weights
    if len(weights) != len(types):
        raise ConfigError(f"loss_weights: {len(weights)} weights are given for {len(types)} losses")
    check_beta(beta)
    if discopop_tau <= 0:
        raise ConfigError(f"discopop_tau: must be more than 0: {discopop_tau}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing: must be at least 0 and below 0.5: {label_smoothing}")
    if "exo_pair" in types and label_smoothing == 0.0:
        raise ConfigError("label_smoothing: exo_pair needs more than 0; its paper takes 1e-3")
    check_choice("f_divergence_type", f_divergence_type, DIVERGENCES)
    if f_divergence_type != "reverse_kl" and (wrong := set(types) & set(_REVERSE_KL)):
        raise ConfigError(f"f_divergence_type: {min(wrong)} is only defined with reverse_kl")
    mask = mask.bool()
    chosen_mask, _ = halves(mask)
    weight: float | Tensor = 1.0
    if use_weighting:
        if {"aot", "aot_unpaired"} & set(types):
            raise ConfigError("use_weighting: aot sorts the pairs and has no weight for each pair")
        if log_sum_sq_probs is None:
            raise ConfigError("use_weighting: log_sum_sq_probs is needed as well")
        log_weights = token_means((log_probs - log_sum_sq_probs).detach(), mask)
        weight = halves(log_weights).sum(0).exp()
    logps = _sequence_log_probs(log_probs, mask, ld_alpha)
    ref_logps = _sequence_log_probs(ref_log_probs.detach(), mask, ld_alpha)
    scores = _divergence_scores(logps - ref_logps, f_divergence_type, f_alpha_divergence_coef)
    counts = halves(lengths(mask))
    pairs = _Pairs(logps, ref_logps, scores, counts, beta, label_smoothing, discopop_tau)
    loss = log_probs.new_zeros(())
    for name, factor in zip(types, weights):
        if name == "sft":
            nll = -token_sums(halves(log_probs)[0], chosen_mask) * weight
            part = divided(nll.sum(), token_normalizer, chosen_mask.sum())
        else:
            part = divided((getattr(pairs, name)() * weight).sum(), normalizer, logps.shape[1])
        loss = loss + factor * part
    return LossOutput(loss, pair_metrics(pairs.rewards, logps))


def _sequence_log_probs(log_probs: Tensor, mask: Tensor, ld_alpha: float | None) -> Tensor:
    """Return the log-probability of each completion: (2 * pairs, seq) -> (2, pairs)."""
    if ld_alpha is not None:
        shared = halves(mask.sum(-1)).amin(0).repeat(2)
        tail = mask.cumsum(-1) > shared[:, None]
        log_probs = torch.where(tail, ld_alpha * log_probs, log_probs)
    return halves(token_sums(log_probs, mask))


def _divergence_scores(log_ratio: Tensor, kind: str, alpha: float) -> Tensor:
    """Return f'(ratio), 0 at the ratio 1: losses of means per token depend on that constant."""
    if kind == "forward_kl":  # f'(t) = 1 - 1/t
        return 1 - torch.exp(-log_ratio)
    if kind == "js_divergence":  # f'(t) = log(2t / (t + 1))
        return math.log(2) + F.logsigmoid(log_ratio)
    if kind == "alpha_divergence" and abs(alpha - 1) >= 1e-6:  # f'(t) = (t^(a-1) - 1) / (a-1)
        # exp(80) is still a float32.
        return torch.expm1(((alpha - 1) * log_ratio).clamp(max=80.0)) / (alpha - 1)
    return log_ratio


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
