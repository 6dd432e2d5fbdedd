"""Tests of a loss head that is tied to an embedding."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ligermodels.layers import LossHead
from tests.layers.heads import BATCH, HIDDEN, SEQ, VOCAB, build, data, dense, make
from tests.models.pairs import relative


def test_a_tied_head_has_no_parameter() -> None:
    head, embedding = make(tied=True)
    assert not list(head.parameters())
    assert not head.state_dict()
    assert not list(head.children())
    assert head.weight is embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    assert list(model.state_dict()) == ["embedding.weight"]
    with pytest.raises(ValueError, match="no bias"):
        LossHead(HIDDEN, VOCAB, bias=True, tied_to=embedding)
    with pytest.raises(ValueError, match=rf"weight of \({VOCAB}, .*expected \({VOCAB + 1}, "):
        LossHead(HIDDEN, VOCAB + 1, tied_to=embedding)


def test_a_tie_follows_the_embedding() -> None:
    """The tie survives loading with assign, conversion, copies and pickles."""
    head, embedding = make(tied=True)
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    model.load_state_dict({"embedding.weight": torch.ones(VOCAB, HIDDEN)}, assign=True)
    assert head.weight is embedding.weight
    model.to(torch.bfloat16)
    assert head.weight.dtype == torch.bfloat16
    twin = copy.deepcopy(model)
    assert twin["head"].weight is twin["embedding"].weight
    assert twin["head"].weight is not head.weight
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded["head"].weight is loaded["embedding"].weight
    other = nn.Embedding(VOCAB, HIDDEN)
    head.tie(other)
    assert head.weight is other.weight


def test_a_tied_weight_gets_both_gradients() -> None:
    head, embedding = make(tied=True)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
    _, targets = data()
    head(embedding(ids), targets).loss.backward()
    weight = embedding.weight.detach().double().requires_grad_()
    loss, _ = dense(F.embedding(ids, weight), weight, targets)
    (loss.sum() / (targets != -100).sum()).backward()
    assert relative(embedding.weight.grad, weight.grad) <= 1e-6


@pytest.mark.parametrize("kind", ["tied", "replaced"])
def test_from_log_probs_with_a_bound_on_the_targets(kind: str) -> None:
    head, *_ = build(kind)
    hidden, targets = data()
    options = {"skip_ignored": True, "max_valid": targets.numel()}
    found = head.from_log_probs(
        hidden, targets, lambda tokens, _: tokens.log_probs.sum(), **options
    )
    assert relative(found, head.log_probs(hidden, targets)[0].sum()) <= 1e-6
