"""Distillation through heads, and offline, against float64 and TRL."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.layers import LossHead
from ligermodels.losses.distillation import distillation, top_k_divergence
from tests.kernels import formulas
from tests.kernels.checks import random
from tests.layers.heads import swap
from tests.losses.batches import gradients
from tests.models.pairs import relative

BATCH, SEQ, WIDTH, TEACHER_WIDTH, VOCAB = 2, 7, 20, 12, 37


def heads() -> tuple[LossHead, LossHead]:
    torch.manual_seed(0)
    student = LossHead(WIDTH, VOCAB, softcap=5.0, logit_scale=1.3, z_loss=0.1)
    return student, LossHead(TEACHER_WIDTH, VOCAB, bias=True, softcap=7.0)


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = random(BATCH, SEQ, WIDTH, seed=1).float().requires_grad_()
    targets = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    return (
        hidden,
        random(BATCH, SEQ, TEACHER_WIDTH, seed=2).float(),
        targets.masked_fill(targets % 3 == 0, -100),
    )


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, None])
def test_two_heads(beta) -> None:
    student, teacher = heads()
    hidden, teacher_hidden, targets = states()
    teacher_hidden.requires_grad_()
    options = {"beta": beta, "temperature": 2.0}
    pairs = student, hidden, teacher, teacher_hidden
    loss = distillation(*pairs, targets=targets, chunk_size=5, **options)
    of_teacher = [teacher_hidden, *teacher.parameters()]
    grads = torch.autograd.grad(loss, [hidden, student.weight, *of_teacher], allow_unused=True)
    assert grads[2:] == (None,) * len(of_teacher)
    teacher_hidden = teacher_hidden.detach()
    leaves = [x.detach().double().requires_grad_() for x in (hidden, student.weight)]
    scales = {"softcap": 5.0, "logit_scale": 1.3, "teacher_softcap": 7.0}
    given = *leaves, teacher_hidden.double(), teacher.weight.double()
    bias, mask = teacher.proj.bias.double(), targets != -100
    exact = formulas.linear_divergence(*given, teacher_bias=bias, mask=mask, **scales, **options)
    assert relative(loss, exact) <= 1e-5  # a small difference of larger terms
    for grad, want in zip(grads, torch.autograd.grad(exact, leaves)):
        assert relative(grad, want) <= 1e-5
    options["normalizer"] = int(mask.sum())  # with it, micro-batches add up
    parts = [
        distillation(student, h, teacher, t, targets=y, **options)
        for h, t, y in zip(hidden, teacher_hidden, targets)
    ]
    assert relative(sum(parts), loss) <= 1e-5
    swap(student)
    with pytest.raises(ValueError, match="projection of head is a Counting"):
        distillation(*pairs)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, None])
def test_top_k(beta) -> None:
    """The stored classes and the rest of the mass, as a distribution of k + 1 classes."""
    student, _ = heads()
    hidden, _, targets = states()
    teacher = random(BATCH, SEQ, VOCAB, seed=3, scale=2.0).log_softmax(-1)
    stored, ids = teacher.topk(5, -1)
    ids[..., 4], stored[..., 4] = -1, -torch.inf  # padding

    stored.requires_grad_()

    def loss_of(log_p: torch.Tensor) -> torch.Tensor:
        return top_k_divergence(log_p, stored, beta).sum()

    out = student(hidden, targets.clamp(min=0), reduction="none", alternatives=ids, chunk_size=5)
    loss = loss_of(out.token_alternative_log_probs)
    *grads, of_teacher = torch.autograd.grad(
        loss, [hidden, student.weight, stored], allow_unused=True
    )
    assert of_teacher is None
    stored = stored.detach()
    leaves = [x.detach().double().requires_grad_() for x in (hidden, student.weight)]
    t = 5 * torch.tanh(1.3 * F.linear(*leaves) / 5)
    p = t.log_softmax(-1).gather(-1, ids[..., :4]).exp()
    q = stored[..., :4].exp()
    log_p, log_q = (torch.cat((x, 1 - x.sum(-1, keepdim=True)), -1).log() for x in (p, q))
    eye = torch.eye(5).double()
    exact = formulas.linear_divergence(log_p, eye, log_q, eye, beta=beta, reduction="sum")
    # The head also gives the function whole sequences, so that backward needs no logits.
    whole = student.from_log_probs(
        hidden,
        targets.clamp(min=0),
        lambda tokens, i: top_k_divergence(tokens.alternative_log_probs, stored[i], beta).sum(),
        alternatives=ids,
        chunk_size=SEQ,
    )
    for found, own in (
        (loss, grads),
        (whole, torch.autograd.grad(whole, [hidden, student.weight])),
    ):
        assert relative(found, exact) <= 1e-5
        for grad, want in zip(own, torch.autograd.grad(exact, leaves, retain_graph=True)):
            assert relative(grad, want) <= 1e-5


def test_top_k_of_all_classes_is_the_whole_divergence() -> None:
    log_p, log_q = (random(9, 6, seed=i).log_softmax(-1) for i in (1, 2))
    exact = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    assert relative(top_k_divergence(log_p, log_q, 0.0), exact) <= 1e-5
    log_p = log_q[:, :3].clone().requires_grad_()
    same = top_k_divergence(log_p, log_q[:, :3], 0.0)
    assert same.abs().max() <= 1e-12 and gradients(same.sum(), log_p)[0].abs().max() <= 1e-6
    with pytest.raises(ValueError, match="expected equal shapes"):
        top_k_divergence(log_p, log_q)
