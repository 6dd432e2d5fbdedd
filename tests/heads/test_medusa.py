"""Medusa's heads: losses and gradients against plain PyTorch, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import ConfigError
from ligermodels.heads.medusa import MedusaHeads, draft_targets
from ligermodels.layers import LossHead
from tests.layers.heads import swap
from tests.models.pairs import relative
from tests.pairwise import pairwise

HIDDEN, VOCAB, BATCH, SEQ, HEADS = 20, 37, 3, 9, 3


def make(tied: bool = False, **options) -> tuple[LossHead, MedusaHeads]:
    """Return a head, and heads whose blocks are not the identity."""
    torch.manual_seed(0)
    head = LossHead(HIDDEN, VOCAB, softcap=5.0)
    heads = MedusaHeads(head, HEADS, tied=tied, **options)
    for parameter in heads.blocks.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for own in heads.heads:
        torch.nn.init.normal_(own.weight, std=0.3)
    return head, heads


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, SEQ, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    labels[0, 3:5] = -100
    return hidden, labels


def eager(heads: MedusaHeads, hidden: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    losses = []
    for i, block in enumerate(heads.blocks):
        x = hidden
        for layer in block:
            x = x + F.silu(F.linear(x, layer.linear.weight, layer.linear.bias))
        logits = 5 * torch.tanh(F.linear(x, heads.head(i).weight) / 5)
        losses.append(
            F.cross_entropy(logits[:, : -(i + 2)].flatten(0, 1), labels[:, i + 2 :].flatten())
        )
    return losses


@pairwise(tied=[False, True], num_blocks=[1, 2], chunk_size=[None, 5])
def test_the_losses_of_all_heads(tied, num_blocks, chunk_size) -> None:
    _, heads = make(tied, num_blocks=num_blocks)
    hidden, labels = data()
    out = heads(hidden, labels, chunk_size=chunk_size)
    wanted = eager(heads, hidden, labels)
    total = sum(0.8 ** (i + 1) * x for i, x in enumerate(wanted))
    assert relative(out.loss, total) <= 1e-6
    assert relative(out.losses, torch.stack(wanted)) <= 1e-6
    assert out.num_valid.tolist() == [(labels[:, i + 2 :] != -100).sum() for i in range(HEADS)]
    weights = {heads.head(i).weight for i in range(HEADS)}
    assert len(weights) == (1 if tied else HEADS)
    leaves = [hidden, *heads.blocks.parameters(), *weights]
    grads = torch.autograd.grad(3 * out.loss, leaves)
    for grad, want in zip(grads, torch.autograd.grad(3 * total, leaves)):
        assert relative(grad, want) <= 1e-5
    with torch.no_grad():
        assert relative(heads(hidden, labels).loss, total) <= 1e-6
    heads.heads.requires_grad_(False)
    heads(hidden, labels).loss.backward()
    assert hidden.grad is not None and all(x.grad is None for x in heads.heads.parameters())
    whole = heads(hidden, labels, normalizer=20)
    parts = [heads(h[None], y[None], normalizer=20) for h, y in zip(hidden, labels)]
    assert relative(sum(x.loss for x in parts), whole.loss) <= 1e-6
    for normalizer in (0, torch.tensor(0)):  # It counts as one.
        out = heads(hidden, torch.full_like(labels, -100), normalizer=normalizer)
        assert out.loss == 0 and (out.losses == 0).all()
    assert torch.equal(heads(hidden, labels, num_items_in_batch=20).loss, whole.loss)
    with pytest.raises(ValueError, match="two names of one option"):
        heads(hidden, labels, normalizer=20, num_items_in_batch=20)
    with pytest.raises(ValueError, match="normalizer"):
        heads(hidden, labels, normalizer=-1)


def test_targets_stay_in_their_document() -> None:
    labels = torch.arange(8)[None]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    assert draft_targets(labels, 1, None, -1).tolist() == [[2, 3, 4, 5, 6, 7, -1, -1]]
    assert draft_targets(labels, 1, documents, -1).tolist() == [[2, -1, -1, 5, 6, -1, -1, -1]]
    for given in (None, documents):  # further ahead than the row is long
        assert draft_targets(labels, 9, given, -1).tolist() == [[-1] * 8]


def test_new_heads_are_the_old_one() -> None:
    head = LossHead(HIDDEN, VOCAB, softcap=5.0, bias=True)
    for tied in (False, True):
        heads = MedusaHeads(head, 2, tied=tied)
        hidden, _ = data()
        for logits in heads.logits(hidden):
            assert torch.equal(logits, head.logits(hidden))
        names = {name.split(".")[0] for name, _ in heads.named_parameters()}
        assert names == ({"blocks"} if tied else {"blocks", "heads"})


def test_refusals() -> None:
    head = LossHead(HIDDEN, VOCAB)
    for options in ({"num_heads": 0}, {"num_heads": 1, "num_blocks": 0}):
        with pytest.raises(ConfigError, match="expected positive numbers"):
            MedusaHeads(head, **options)
    hidden, labels = data()
    for tied in (False, True):
        with pytest.raises(TypeError, match="multiple values for keyword argument 'reduction'"):
            make(tied)[1](hidden, labels, reduction="mean")
    replaced = LossHead(20, 37)
    swap(replaced)
    with pytest.raises(ConfigError, match="projection is a Counting"):
        MedusaHeads(replaced, 1)
    head.vocab_shard = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="split over ranks; make the heads before"):
        MedusaHeads(head, 1)
