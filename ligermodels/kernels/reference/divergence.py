"""Plain PyTorch: the divergence of rows of a student's logits from a teacher's, and its gradient.

Both logits are t = softcap * tanh(scale * logits / softcap); p = softmax(t) of the student's and q
= softmax(t) of the teacher's.
"""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, compute_dtype
from ligermodels.kernels.loss_options import DivergenceOptions


def divergence_rows(
    student: Tensor,
    teacher: Tensor,
    valid: Tensor | None,
    grad_output: Tensor | None,
    options: DivergenceOptions,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the divergence of each row and, given grad_output, the student's gradient.

    With m = (1 - beta) p + beta q, the divergence is beta KL(q || m) + (1 - beta) KL(p || m). At
    the ends it is KL(q || p) for beta = 0 and KL(p || q) for beta = 1, the limits of it divided by
    beta or 1 - beta (arXiv:2306.13649, equation 1). With beta None it is sum |p - q| / 2.

    Args:
        student, teacher: (rows, vocab).
        valid: (rows) bool, or None if all rows count. The others get 0.
        grad_output: (rows) or (1,) upstream gradients; None for no gradient.
        in_place: whether to overwrite student with its gradient.
    Returns: divergence (rows), float32 (float64 for float64), and gradient (rows, vocab) or None.
    """
    beta, softcap, logit_scale, teacher_softcap, teacher_scale = options
    t, tanh = _transformed(student, softcap, logit_scale)
    log_p = torch.log_softmax(t, -1)
    log_q = torch.log_softmax(_transformed(teacher, teacher_softcap, teacher_scale)[0], -1)
    p, q = log_p.exp(), log_q.exp()
    # slope is the derivative by p; a sum over p does not change, so a constant may be added to it.
    if beta is None:
        values, slope = (p - q).abs() / 2, torch.sign(p - q) / 2
    elif beta == 0:
        values, slope = _times(q, log_q - log_p), None
    elif beta == 1:
        slope = torch.where(p == 0, 0.0, log_p - log_q)
        values = p * slope
    else:
        log_m = torch.log((1 - beta) * p + beta * q)
        slope = (1 - beta) * torch.where(p == 0, 0.0, log_p - log_m)
        values = beta * _times(q, log_q - log_m) + p * slope
    loss = values.sum(-1)
    if valid is not None:
        loss = torch.where(valid, loss, 0.0)
    if grad_output is None:
        return loss, None
    if slope is None:
        grad = p - q
    else:
        grad = p * (slope - (p * slope).sum(-1, keepdim=True))
    grad = grad * (cast(grad_output, t.dtype)[:, None] * logit_scale)
    if tanh is not None:
        grad = grad * (1 - tanh * tanh)
    if valid is not None:
        grad = torch.where(valid[:, None], grad, 0.0)
    return loss, student.copy_(grad) if in_place else cast(grad, student.dtype)


def _times(p: Tensor, log_ratio: Tensor) -> Tensor:
    """Return p * log_ratio, which is 0 if p is 0, also if the ratio is not finite."""
    return torch.where(p == 0, 0.0, p * log_ratio)


def _transformed(
    logits: Tensor, softcap: float | None, logit_scale: float
) -> tuple[Tensor, Tensor | None]:
    scaled = cast(logits, compute_dtype(logits)) * logit_scale
    if softcap is None:
        return scaled, None
    tanh = torch.tanh(scaled / softcap)
    return softcap * tanh, tanh
