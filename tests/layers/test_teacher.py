"""A head that learns from a teacher: the same as the divergence of two heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard
from ligermodels.layers.loss_head import Teacher
from ligermodels.losses.distillation import distillation
from tests.losses.test_distillation import BATCH, SEQ, VOCAB, heads, states
from tests.models.pairs import relative


def test_a_teacher_of_a_head_is_the_same() -> None:
    """Also with skipped rows, weights of tokens, a padded vocabulary, and beside the targets."""
    student, teacher = heads()
    student.loss_options.pop("z_loss")
    hidden, teacher_hidden, targets = states()
    weights = torch.rand(BATCH, SEQ)
    weight, bias = (F.pad(x, (0,) * (2 * x.dim() - 1) + (3,)) for x in teacher.parameters())
    given = Teacher(teacher_hidden, weight, bias, softcap=7.0, beta=0.3, temperature=2.0)
    common = {"token_weights": weights, "normalizer": 5.0}
    want = distillation(
        *(student, hidden, teacher, teacher_hidden),
        **{"targets": targets, "beta": 0.3, "temperature": 2.0} | common,
    )
    valid = int((targets != -100).sum())
    for skips in (
        {"chunk_size": 5},
        {"skip_ignored": True},
        {"skip_ignored": True, "max_valid": valid + 1},
    ):
        out = student(hidden, targets, teacher=given, **common, **skips)
        assert relative(out.loss, want) <= 1e-6 and out.num_valid == valid
        each = student(
            hidden, targets, teacher=given, token_weights=weights, reduction="none", **skips
        )
        assert relative(each.loss.sum() / 5, want) <= 1e-6 and (each.loss[targets < 0] == 0).all()
    own = student(hidden, targets, **common).loss
    mixed = student(hidden, targets, teacher=given._replace(share=0.25), **common).loss
    assert relative(mixed, 0.25 * want + 0.75 * own) <= 1e-6


def test_what_a_teacher_of_a_head_refuses() -> None:
    student, teacher = heads()
    hidden, teacher_hidden, targets = states()
    given = Teacher(teacher_hidden, teacher.weight)
    for options, message in (
        ({"label_smoothing": 0.1}, "label_smoothing cannot be combined with a teacher"),
        ({"return_token_loss": True}, "return_token_loss cannot be combined"),
        ({"teacher": given._replace(share=2.0)}, "share in"),
        ({"teacher": given._replace(hidden=teacher_hidden[:, 1:])}, r"expected \(2, 7\)"),
        ({"teacher": given._replace(weight=teacher.weight[1:])}, "36 classes and the head 37"),
    ):
        with pytest.raises(ValueError, match=message):
            student(hidden, targets, **{"teacher": given} | options)
    student.vocab_shard = VocabShard(None, 0, VOCAB)  # of a rank of tensor parallelism
    with pytest.raises(ValueError, match="vocabulary of head is split over ranks"):
        student(hidden, targets, teacher=given)
