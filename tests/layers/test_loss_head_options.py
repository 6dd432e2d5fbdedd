"""Options of the loss head: defaults and overrides, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ligermodels.layers import LossHead
from tests.layers.heads import KINDS, SEQ, VOCAB, build, data, dense, make
from tests.models.pairs import relative


def test_defaults_of_the_constructor_can_be_overridden() -> None:
    head, _ = make(z_loss=0.1, softcap=3.0, ignore_index=0)
    hidden, targets = data()
    targets = targets.masked_fill(targets == -100, 0)
    loss, z = dense(hidden, head.weight, targets, z_loss=0.1, softcap=3.0, ignore_index=0)
    valid = (targets != 0).sum()
    out = head(hidden, targets)
    assert out.num_valid == valid
    assert relative(out.loss, loss.sum() / valid) <= 1e-6
    out = head(hidden, targets, z_loss=0.0)
    assert relative(out.loss, (loss - z).sum() / valid) <= 1e-6


def test_unknown_options_are_refused_by_the_constructor() -> None:
    with pytest.raises(TypeError, match=r"\['foo'\]; known: .*label_smoothing"):
        LossHead(8, 5, foo=1)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"normalizer": -4}, "normalizer=-4"),
        ({"normalizer": float("inf")}, "normalizer=inf"),
        ({"normalizer": torch.ones(1)}, r"normalizer \(1,\)"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
        ({"chunk_size": 1.5}, "chunk_size=1.5"),
    ],
)
def test_option_values_are_checked(options: dict, complaint: str) -> None:
    head = LossHead(8, 5)
    with pytest.raises(ValueError, match=complaint):
        head(torch.randn(3, 8), torch.tensor([0, 1, 2]), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_calls_are_refused(kind: str) -> None:
    head, _, _ = build(kind)
    hidden, targets = data()
    with pytest.raises(IndexError):
        head(hidden, targets.masked_fill(targets == -100, VOCAB))
    with pytest.raises(ValueError, match="reduction"):
        head(hidden, targets, reduction="average")
    with pytest.raises(ValueError, match="normalizer"):
        head(hidden, targets, reduction="sum", normalizer=3)
    with pytest.raises(ValueError, match="targets"):
        head(hidden, targets[:, :-1])
    with pytest.raises(ValueError, match="targets"):  # whole chunks fit, the last is missing
        head(hidden, targets[:2], chunk_size=SEQ)
    with pytest.raises(ValueError, match="chunk_size"):
        head(hidden, targets, chunk_size=0)
    with pytest.raises(ValueError, match="max_scratch_bytes"):
        head(hidden, targets, max_scratch_bytes=10)
