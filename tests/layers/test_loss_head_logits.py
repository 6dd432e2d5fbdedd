"""Tests of the logits that the loss head returns on request."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.heads import BATCH, KINDS, VOCAB, build, data
from tests.models.pairs import relative


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str) -> None:
    head, weight, bias = build(kind, softcap=2.0, logit_scale=0.7)
    hidden, _ = data()
    expected = 2.0 * torch.tanh(0.7 * F.linear(hidden, weight, bias) / 2.0)
    assert relative(head.logits(hidden), expected) <= 1e-6
    assert head.logits(hidden[:, -1]).shape == (BATCH, VOCAB)


def test_logits_call_a_swapped_head_that_has_no_weight() -> None:
    head, _, _ = build("own")
    hidden, _ = data()
    expected = head.logits(hidden)
    head.proj = nn.Sequential(head.proj)
    assert torch.equal(head.logits(hidden), expected)
