"""Policy losses over token log-probabilities: GRPO and its relatives, GSPO, RLOO.

The names and the defaults of all options are those of TRL 1.16. All log-probabilities are (batch,
seq), as `LossHead.log_probs` returns them, at the temperature of the sampling; the mask (batch,
seq) is true at the tokens of the completion. Advantages come from `group_advantages` or
`rloo_advantages`. Of all tensors only log_probs and the entropy get gradients.

Each loss is a sum divided by a normalizer, which `grpo_normalizer` counts. If a step has several
micro-batches or ranks, pass the sum of their counts; the sum over the micro-batches is then the
loss of one big batch. (DDP and FSDP average gradients: multiply by the number of ranks.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.losses.terms import (
    LossOutput,
    Mean,
    check_choice,
    check_shape,
    check_shapes,
    counted,
    divided,
    mean_of,
    token_means,
    token_sums,
)

GRPO_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")
_MEAN_OF_ROWS = ("grpo", "sapo", "luspo")  # the others sum over all tokens
RATIO_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    sampling_log_probs: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    entropy: Tensor | None = None,
    loss_type: str = "dapo",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    use_bias_correction_kl: bool = True,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    off_policy_mask_threshold: float | None = None,
    top_entropy_quantile: float = 1.0,
    entropy_coef: float = 0.0,
    max_completion_length: int | None = None,
    normalizer: float | Tensor | None = None,
    token_normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the loss of group relative policy optimization, or of one of its relatives.

    Args:
        log_probs: (batch, seq), of the policy that is trained.
        advantages: (batch), or (batch, seq) for one of each token.
        mask: (batch, seq).
        old_log_probs: of the policy before the steps on this batch. The default, log_probs, is
            right for the first of these steps: the ratio is then 1, and only its gradient counts.
        ref_log_probs: of the reference model, if beta is not 0.
        sampling_log_probs: of the engine that sampled, for off_policy_mask_threshold; by default
            old_log_probs. NaN means that the engine has none.
        importance_sampling_ratio: (batch, seq) or (batch, 1), from `importance_ratio`: a factor
            that corrects for an engine that samples from slightly other probabilities.
        entropy: (batch, seq), for top_entropy_quantile and entropy_coef, and for the metrics.
            (Where the mask is false, no tensor is looked at: it may hold infinity or NaN.)
        loss_type: one of `GRPO_LOSS_TYPES`: "grpo" (Shao et al. 2024, arXiv 2402.03300), "bnpo",
            "dr_grpo" (Liu et al. 2025, arXiv 2503.20783), "dapo" (Yu et al. 2025, arXiv
            2503.14476), "cispo" (MiniMax 2025, arXiv 2506.13585), "sapo" (Gao et al. 2025, arXiv
            2511.20347), "luspo" (arXiv 2602.05261) and "vespo" (arXiv 2602.10693).
        beta: the weight of the KL from the reference. use_bias_correction_kl multiplies the KL's
            estimate by the ratio (DeepSeek-AI 2025, arXiv 2512.02556).
        epsilon, epsilon_high: how far below and above 1 the ratio is clipped; the second is the
            first by default. For "cispo" epsilon_high is the largest ratio itself.
        delta: the largest ratio also where clipping would not apply (two-sided clipping, Prime
            Intellect 2025, arXiv 2505.07291).
        importance_sampling_level: "token", or "sequence" for the geometric mean of the completion's
            ratios (GSPO, Zheng et al. 2025, arXiv 2507.18071).
        sapo_temperature_pos, sapo_temperature_neg: constants of "sapo", for advantages above 0 and
            for the others.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: constants of "vespo", for
            advantages of at least 0 and for the others.
        off_policy_mask_threshold: a completion has no loss if its advantage is negative and the
            mean log ratio of the sampler to the policy is above this (arXiv 2512.02556).
        top_entropy_quantile: the share of the tokens of this batch, those of highest entropy, whose
            advantage counts (Wang et al. 2025, arXiv 2506.01939).
        entropy_coef: the weight of the mean entropy, which is added to the objective.
        max_completion_length: the constant length that "dr_grpo" divides by.
        normalizer: the sum of `grpo_normalizer` over the whole step.
        token_normalizer: for entropy_coef, the number of completion tokens of the whole step (of
            those that top_entropy_quantile leaves).
    Returns: the loss and the metrics entropy, kl, clip_ratio/low_mean, clip_ratio/high_mean,
        clip_ratio/region_mean, cispo_clip_ratio, vespo/phi_seq_mean and policy_loss, if they apply.
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    check_choice("loss_type", loss_type, GRPO_LOSS_TYPES)
    check_choice("importance_sampling_level", importance_sampling_level, LEVELS)
    if beta and ref_log_probs is None:
        raise ConfigError("ref_log_probs: beta is not 0, so those of the reference are needed")
    if entropy is None and (entropy_coef or top_entropy_quantile < 1.0):
        raise ConfigError("entropy: entropy_coef and top_entropy_quantile need it")
    check_shapes(
        mask,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        sampling_log_probs=sampling_log_probs,
        entropy=entropy,
    )
    check_shape("advantages", advantages, mask.shape[:1], mask.shape)
    factor = importance_sampling_ratio
    check_shape("importance_sampling_ratio", factor, mask.shape, (len(mask), 1))
    mask = mask.bool()
    # What stands beside the completions is not looked at.
    advantages = counted(advantages.detach().view(len(mask), -1), mask)
    log_probs = counted(log_probs, mask)
    factor = None if factor is None else counted(factor.detach(), mask, fill=1.0)
    old = counted((log_probs if old_log_probs is None else old_log_probs).detach(), mask)
    log_ratio = log_probs - old
    if importance_sampling_level == "sequence":
        ratio = token_means(log_ratio, mask)[:, None].exp()
    else:
        ratio = log_ratio.exp()
    metrics: dict[str, Mean] = {}
    if loss_type == "cispo":
        if epsilon_high is None:
            raise ConfigError("epsilon_high: cispo needs it, the largest ratio, for example 5.0")
        losses = -ratio.clamp(max=epsilon_high).detach() * advantages * log_probs
        metrics["cispo_clip_ratio"] = _fraction((ratio > epsilon_high) & (advantages > 0), mask)
    elif loss_type == "sapo":
        heat = _either(advantages > 0, sapo_temperature_pos, sapo_temperature_neg, ratio)
        losses = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
    elif loss_type == "vespo":
        k = _either(advantages >= 0, vespo_k_pos, vespo_k_neg, ratio)
        rate = _either(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg, ratio)
        weight = _gamma_weight(log_ratio.detach(), mask, factor, k, rate)
        losses = -weight * advantages * log_probs
        metrics["vespo/phi_seq_mean"] = _fraction(weight, mask)
    else:
        losses, metrics = _clipped(ratio, advantages, mask, epsilon, epsilon_high, delta)
    if off_policy_mask_threshold is not None:
        sampled = old if sampling_log_probs is None else sampling_log_probs
        drift = token_means(torch.nan_to_num(sampled - log_probs.detach()), mask)[:, None]
        losses = losses * ((advantages >= 0) | (drift <= off_policy_mask_threshold))
    acting = mask
    if entropy is not None:
        metrics["entropy"] = mean_of(entropy, mask)
        if top_entropy_quantile < 1.0:
            acting = _highest_entropy(entropy.detach(), mask, top_entropy_quantile)
            losses = losses * acting
    if factor is not None and loss_type != "vespo":
        losses = losses * factor
    if beta and ref_log_probs is not None:
        # The estimate k3 of the KL from the reference (Schulman 2020), which is never below 0.
        log_ratio = torch.where(mask, ref_log_probs.detach() - log_probs, 0.0)
        kl = log_ratio.exp() - log_ratio - 1
        kl = kl * ratio if use_bias_correction_kl else kl
        losses = losses + beta * kl
        metrics["kl"] = mean_of(kl, mask)

    losses = losses.expand_as(log_probs)  # one of each sequence counts at each of its tokens
    means = loss_type in ("grpo", "sapo")
    total = (token_means(losses, mask) if means else token_sums(losses, mask)).sum()
    count = grpo_normalizer(mask, loss_type, max_completion_length)
    loss = divided(total, normalizer, count)
    if entropy_coef and entropy is not None:
        metrics["policy_loss"] = Mean(total.detach(), count)
        entropy_sum = torch.where(acting, entropy, 0.0).sum()
        loss = loss - entropy_coef * divided(entropy_sum, token_normalizer, acting.sum())
    return LossOutput(loss, metrics)


def grpo_normalizer(
    mask: Tensor, loss_type: str = "dapo", max_completion_length: int | None = None
) -> Tensor:
    """Return what the sum of `grpo_loss` is divided by: rows, tokens or rows times a length.

    Args: mask (batch, seq); loss_type, max_completion_length, as in `grpo_loss`.
    Returns: a scalar int64 tensor; the sum over micro-batches and ranks is that of the step.
    Raises:
        ConfigError: the type is unknown, or it is "dr_grpo" and there is no length.
    """
    check_choice("loss_type", loss_type, GRPO_LOSS_TYPES)
    rows = torch.full((), len(mask), device=mask.device)
    if loss_type in _MEAN_OF_ROWS:
        return rows
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ConfigError("max_completion_length: dr_grpo divides by it, so it is needed")
        return rows * max_completion_length
    return mask.bool().sum()


def rloo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    normalizer: float | Tensor | None = None,
) -> LossOutput:
    """Return the loss of REINFORCE leave-one-out, clipped on the ratio of whole completions.

    Ahmadian et al. 2024, arXiv 2402.14740. The KL is part of the reward: see `rloo_advantages`.

    Args:
        log_probs, mask, old_log_probs, entropy: (batch, seq), as in `grpo_loss`.
        advantages: (batch).
        epsilon, epsilon_high: how far below and above 1 the ratio is clipped.
        normalizer: the number of completions of the whole step.
    Returns: the loss and the metrics entropy and clip_ratio/..., as `grpo_loss`.
    Raises:
        ConfigError: a shape is wrong.
    """
    check_shapes(mask, log_probs=log_probs, old_log_probs=old_log_probs, entropy=entropy)
    check_shape("advantages", advantages, mask.shape[:1])
    old = (log_probs if old_log_probs is None else old_log_probs).detach()
    ratio = token_sums(log_probs - old, mask)[:, None].exp()
    losses, metrics = _clipped(ratio, advantages.detach()[:, None], mask, epsilon, epsilon_high)
    if entropy is not None:
        metrics["entropy"] = mean_of(entropy, mask)
    return LossOutput(divided(losses.sum(), normalizer, len(mask)), metrics)


def group_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    reward_weights: Tensor | None = None,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> Tensor:
    """Return how much better each completion is than the others of its prompt, as in GRPO.

    Args:
        rewards: (batch) or (batch, functions). NaN: the function has no reward for the completion.
            A completion without any reward has the advantage 0, and its group does without it.
        num_generations: the size of a group; completions of a prompt are consecutive rows.
        reward_weights: (functions), 1 each by default.
        scale_rewards: whether advantages are divided by the standard deviation of the "group", of
            the whole "batch", or not ("none", Dr. GRPO).
        multi_objective_aggregation: "sum_then_normalize", or "normalize_then_sum", which scales
            each function's rewards by group before their sum, and the sum by batch (arXiv
            2601.05242).
    Returns: (batch). For "batch" and "normalize_then_sum", pass the rewards of all ranks.
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    check_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    ways = ("sum_then_normalize", "normalize_then_sum")
    check_choice("multi_objective_aggregation", multi_objective_aggregation, ways)
    table = rewards.view(len(rewards), -1)
    unscored = table.isnan()
    groups = _groups(table, num_generations)  # (prompts, generations, functions)
    if multi_objective_aggregation == "normalize_then_sum":
        table = _standardized(groups, 1).flatten(0, 1)
    summed = _weighted_sum(table, reward_weights, unscored)
    if multi_objective_aggregation == "normalize_then_sum":
        return torch.nan_to_num(_standardized(summed, 0))
    groups = _groups(summed, num_generations)
    if scale_rewards == "group":
        advantages = _standardized(groups, 1)
    else:
        advantages = groups - groups.nanmean(1, keepdim=True)
    if scale_rewards == "batch":
        advantages = advantages / (_nanstd(summed, 0) + 1e-4)
    return torch.nan_to_num(advantages.flatten())


def rloo_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    reward_weights: Tensor | None = None,
    reward_clip_range: tuple[float, float] | None = None,
    normalize_advantages: bool = False,
    beta: float = 0.0,
    kl: Tensor | None = None,
) -> Tensor:
    """Return each completion's reward less the mean reward of the others of its prompt, as in RLOO.

    Args:
        rewards, num_generations, reward_weights: as in `group_advantages`.
        reward_clip_range: the lowest and the highest reward.
        normalize_advantages: whether to scale the advantages of the batch to mean 0, deviation 1.
        beta, kl: beta * kl (batch) is subtracted from the rewards; kl is the sum over a completion
            of the log ratio of the sampling policy to the reference.
    Returns: (batch).
    Raises:
        ConfigError: a shape is wrong.
    """
    table = rewards.view(len(rewards), -1)
    summed = _weighted_sum(table, reward_weights, unscored=table.isnan())
    if reward_clip_range is not None:
        summed = summed.clamp(*reward_clip_range)
    if beta:
        if kl is None:
            raise ConfigError("kl: beta is not 0, so the KL of each completion is needed")
        check_shape("kl", kl, summed.shape)
        summed = summed - beta * kl
    groups = _groups(summed, num_generations)
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    advantages = groups - (groups.nansum(1, keepdim=True) - groups) / others
    advantages = torch.where(others > 0, advantages, math.nan).flatten()
    if normalize_advantages:
        advantages = _standardized(advantages, 0)
    return torch.nan_to_num(advantages)


@torch.no_grad()
def importance_ratio(
    old_log_probs: Tensor,
    sampling_log_probs: Tensor,
    mask: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """Return the ratio of the policy's probabilities to those of the engine that sampled.

    It corrects for engines that compute slightly other probabilities (TRL's
    vllm_importance_sampling_correction).

    Args:
        old_log_probs, sampling_log_probs, mask: (batch, seq). A NaN of the engine has the ratio 1.
        mode: one of `RATIO_MODES`: a ratio of each token or of each sequence, which is truncated to
            the bounds, or becomes 0 outside of them.
    Returns: (batch, seq) for tokens, (batch, 1) for sequences.
    Raises:
        ConfigError: an option or a shape is wrong.
    """
    check_choice("mode", mode, RATIO_MODES)
    check_shapes(mask, old_log_probs=old_log_probs, sampling_log_probs=sampling_log_probs)
    difference = torch.where(mask.bool(), old_log_probs - sampling_log_probs, 0.0)
    difference = torch.nan_to_num(difference, nan=0.0)
    level, _, action = mode.partition("_")
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low = 0.0 if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if action == "truncate":
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return one of two numbers where a condition is true or false, in the dtype of `like`."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def _clipped(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float | None,
    delta: float | None = None,
) -> tuple[Tensor, dict[str, Mean]]:
    """Return the clipped objective of PPO as a loss, and how often the bounds apply."""
    high = low if high is None else high
    kept = ratio if delta is None else ratio.clamp(max=delta)
    losses = -torch.min(kept * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    is_low = (kept < 1 - low) & (advantages < 0)
    is_high = (kept > 1 + high) & (advantages > 0)
    return losses, {
        "clip_ratio/low_mean": _fraction(is_low, mask),
        "clip_ratio/high_mean": _fraction(is_high, mask),
        "clip_ratio/region_mean": _fraction(is_low | is_high, mask),
    }


def _gamma_weight(
    log_ratio: Tensor, mask: Tensor, factor: Tensor | None, k: Tensor, rate: Tensor
) -> Tensor:
    """Return VESPO's weight e^l w^k e^(-l w) of each sequence, w its ratio: (batch, 1)."""
    lowest = math.log(1e-8)
    log_w = token_sums(log_ratio.clamp(-20.0, 20.0), mask)[:, None]
    if factor is not None:
        log_w = log_w + factor.log().clamp(lowest, 20.0).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, 20.0)
    rate = rate.clamp(min=1e-4)
    weight = torch.exp(rate + k * log_w - rate * log_w.exp())
    return torch.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0)


def _highest_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the mask of those tokens whose entropy is in the highest share of the batch."""
    # Entropy is never below 0, so the tokens that do not count come first when sorted.
    values = torch.where(mask, entropy, -1.0).flatten().sort().values
    # The threshold is the quantile as torch.quantile interpolates it, which takes no mask.
    count = mask.sum()
    position = (count - 1).clamp(min=0) * (1 - share) + (mask.numel() - count)
    ends = torch.stack([position.floor(), position.ceil()]).long().clamp(max=mask.numel() - 1)
    below, above = values.index_select(0, ends)  # an index that is a number would wait for the GPU
    threshold = torch.lerp(below, above, position.frac().to(values.dtype))
    return mask & (entropy >= threshold)


def _fraction(values: Tensor, mask: Tensor) -> Mean:
    """Return the mean over tokens, or over sequences if there is one value for each."""
    return mean_of(values.float(), None if values.shape[1] == 1 else mask)


def _groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Return rewards by prompt: (batch, ...) -> (prompts, generations, ...)."""
    if num_generations < 2 or len(rewards) % num_generations:
        raise ConfigError(
            f"num_generations: {num_generations} for {len(rewards)} rewards; expected at least 2, "
            "and whole groups"
        )
    return rewards.unflatten(0, (-1, num_generations))


def _weighted_sum(table: Tensor, weights: Tensor | None, unscored: Tensor) -> Tensor:
    """Return the weighted sum over functions, NaN for a completion that none of them scored."""
    check_shape("reward_weights", weights, table.shape[1:])
    weighted = table if weights is None else table * weights.to(table.device)
    return torch.where(unscored.all(1), math.nan, weighted.nansum(1))


def _standardized(values: Tensor, dim: int) -> Tensor:
    """Return values less their mean, divided by their standard deviation; NaN stays NaN."""
    return (values - values.nanmean(dim, keepdim=True)) / (_nanstd(values, dim) + 1e-4)


def _nanstd(values: Tensor, dim: int) -> Tensor:
    """Return the standard deviation, with Bessel's correction, of the values that are not NaN."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    squares = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (count - 1)).sqrt()
