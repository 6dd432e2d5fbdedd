"""Losses that teach a student a teacher's next-token distribution.

`distillation` takes two heads and never holds all logits of either. `top_k_divergence` takes the
stored log-probabilities of a teacher's likeliest classes, and does not need the teacher itself.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels import linear_divergence
from ligermodels.layers.loss_head import LossHead


def distillation(
    head: LossHead,
    hidden: Tensor,
    teacher_head: LossHead,
    teacher_hidden: Tensor,
    *,
    targets: Tensor | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """Return the generalized Jensen-Shannon divergence between a student and a teacher.

    beta = 0 is the forward KL(teacher || student), beta = 1 the reverse KL(student || teacher), as
    in GKD (arXiv:2306.13649) and TRL; beta None is the total variation distance. Soft caps, scales
    and biases are those of the heads. Only the student gets gradients.

    Args:
        head, teacher_head: of the same vocabulary; the hidden sizes may differ.
        hidden: (..., hidden), teacher_hidden: (..., teacher's hidden), of the same tokens.
        targets: (...) int64, aligned with hidden. A token whose target is ignore_index does not
            count; the other targets are not looked at. By default all tokens count.
        options: beta (0.5), temperature (1.0), token_weights, reduction ("mean"), normalizer,
            chunk_size and max_scratch_bytes, as in `ligermodels.kernels.linear_divergence`. The
            temperature divides the logits of both heads; the loss is not multiplied with its
            square. By default the normalizer is the number of tokens that count.
    Returns: a scalar in float32, or (...) for reduction "none".
    Raises:
        ValueError: as `linear_divergence`; or a head's projection is not a plain nn.Linear.
    """
    student = head.plain_parameters(hidden, "head")
    with torch.no_grad():
        teacher = teacher_head.plain_parameters(teacher_hidden, "teacher_head")
    return linear_divergence(
        hidden,
        student.weight,
        teacher_hidden,
        teacher.weight,
        student.bias,
        teacher.bias,
        mask=None if targets is None else targets != ignore_index,
        softcap=student.softcap,
        logit_scale=student.logit_scale,
        teacher_softcap=teacher.softcap,
        teacher_scale=teacher.logit_scale,
        **options,
    )


def top_k_divergence(
    log_probs: Tensor, teacher_log_probs: Tensor, beta: float | None = 0.0
) -> Tensor:
    """Return the divergence over k classes of each token, with all other classes as one more.

    The k classes are those that were stored of the teacher. The rest of the probability is one more
    class, for the student and for the teacher, so the divergence is 0 only if the student gives the
    stored classes the teacher's probabilities. It is at most the divergence over all classes.

    Args:
        log_probs: (..., k) of the student, differentiable: token_alternative_log_probs of a head
            with `alternatives` the stored classes.
        teacher_log_probs: (..., k) of the teacher, at the student's temperature. Where it is
            -infinity, the class is padding and its id was negative.
        beta: as in `distillation`.
    Returns: (...) in the dtype of log_probs.
    """
    if log_probs.shape != teacher_log_probs.shape or not (beta is None or 0 <= beta <= 1):
        raise ValueError(
            f"top_k_divergence: log_probs {tuple(log_probs.shape)}, teacher_log_probs "
            f"{tuple(teacher_log_probs.shape)}, beta={beta}; expected equal shapes and a beta in "
            "[0, 1], or None"
        )
    teacher_log_probs = teacher_log_probs.detach().to(log_probs.dtype)
    padding = teacher_log_probs == -torch.inf
    log_p = _with_rest(log_probs.masked_fill(padding, -torch.inf))
    log_q = _with_rest(teacher_log_probs)
    if beta is None:
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if beta == 0:
        return _kl(log_q, log_p)
    if beta == 1:
        return _kl(log_p, log_q)
    log_m = torch.logaddexp(
        log_p + torch.log1p(log_p.new_tensor(-beta)), log_q + log_p.new_tensor(beta).log()
    )
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append log(1 - sum(exp(log_probs))), with at least the precision of float32 as the rest."""
    known = log_probs.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(torch.float32).eps)
    return torch.cat((log_probs, torch.log(-torch.expm1(known))), -1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum p (log p - log q); a class of probability 0 adds nothing."""
    there = log_p > -torch.inf
    ratio = torch.where(there, log_p, 0.0) - torch.where(there, log_q, 0.0)
    return (torch.where(there, log_p, -torch.inf).exp() * ratio).sum(-1)
