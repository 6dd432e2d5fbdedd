"""The loss head's results for each token: statistics, log-probabilities, skipped tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels import LigerLlama
from ligermodels.models.llama import LlamaConfig
from tests.layers.heads import BATCH, KINDS, SEQ, VOCAB, build, data, dense_stats
from tests.models.pairs import relative
from tests.pairwise import pairwise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_token_stats(kind: str, reduction: str) -> None:
    """All projections return statistics with the loss; with "none" they are differentiable."""
    head, weight, bias = build(kind, softcap=3.0, logit_scale=1.3)
    bias = None if bias is None else bias.detach().double()
    hidden, targets = data()
    out = head(hidden, targets, reduction=reduction, chunk_size=5, return_token_stats=True)
    exact = hidden.detach().double().requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    options = {"softcap": 3.0, "logit_scale": 1.3}
    log_probs, entropy, correct = dense_stats(exact, weight64, targets, bias, **options)
    assert relative(out.token_log_probs, log_probs) <= 1e-6
    assert relative(out.token_entropy, entropy) <= 1e-6
    assert torch.equal(out.token_correct, correct)
    assert relative(out.token_loss, -log_probs) <= 1e-6
    if reduction == "mean":
        assert not (out.token_log_probs.requires_grad or out.token_entropy.requires_grad)
        return
    total = (out.loss + 2 * out.token_log_probs.square() + out.token_entropy.square()).sum()
    grads = torch.autograd.grad(total, [hidden, weight])
    wanted = (-log_probs + 2 * log_probs.square() + entropy.square()).sum()
    for grad, want in zip(grads, torch.autograd.grad(wanted, [exact, weight64])):
        assert relative(grad, want) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs(kind: str, entropy: bool) -> None:
    """The head's options apply, except those that only change the loss."""
    head, weight, bias = build(
        kind, softcap=3.0, z_loss=0.1, label_smoothing=0.1, reduction="sum", ignore_index=0
    )
    bias = None if bias is None else bias.detach().double()
    hidden, targets = data()
    targets = targets.masked_fill(targets == -100, 0)
    log_probs, got_entropy = head.log_probs(hidden, targets, entropy=entropy, chunk_size=10)
    exact = hidden.detach().double().requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    want, want_entropy, _ = dense_stats(exact, weight64, targets, bias, softcap=3.0, ignore_index=0)
    total, wanted = log_probs.square().sum(), want.square().sum()
    assert log_probs.dtype == torch.float32
    assert relative(log_probs, want) <= 1e-6
    if entropy:
        assert relative(got_entropy, want_entropy) <= 1e-6
        total, wanted = total + got_entropy.sum(), wanted + want_entropy.sum()
    else:
        assert got_entropy is None
    grads = torch.autograd.grad(total, [hidden, weight])
    for grad, exact_grad in zip(grads, torch.autograd.grad(wanted, [exact, weight64])):
        assert relative(grad, exact_grad) <= 2e-6
    with pytest.raises(TypeError, match=r"unknown options \['z_loss'\]"):
        head.log_probs(hidden, targets, z_loss=0.1)


@pairwise(kind=KINDS, reduction=["mean", "sum", "none"], max_valid=[None, 25])
def test_skipping_ignored_targets(kind: str, reduction: str, max_valid: int | None) -> None:
    """Every kind of projection gives the same outputs and gradients from the valid rows alone."""
    head, weight, _ = build(kind, z_loss=0.1, reduction=reduction, chunk_size=10)
    hidden, targets = data()
    results = []
    for options in ({}, {"skip_ignored": True, "max_valid": max_valid}):
        out = head(hidden, targets, return_token_stats=True, **options)
        grads = torch.autograd.grad(out.loss.sum(), [hidden, weight])
        log_probs, entropy = head.log_probs(hidden, targets, entropy=True, **options)
        floats = (out.loss, out.z_loss, out.token_loss, out.token_log_probs, out.token_entropy)
        results.append((*floats, *grads, log_probs, entropy))
        assert out.num_valid == 24
    for plain, skipped in zip(*results):
        assert relative(skipped, plain) <= 1e-6
    if "swapped" in kind:
        assert max(head.proj.rows) <= 10
        rows = head.proj.rows
        assert sum(rows) == 3 * BATCH * SEQ + 3 * (max_valid or 24)
    with pytest.raises(ValueError, match="max_valid=23, but 24 targets"):
        head(hidden, targets, skip_ignored=True, max_valid=23)


def test_token_stats_through_a_model() -> None:
    """A wrapped model has only forward; its log-probabilities must have gradients, too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LigerLlama(config)
    ids = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    out = model(ids, labels=ids, reduction="none", return_token_stats=True)
    hidden = model(ids)
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    log_probs, entropy = model.head.log_probs(hidden, targets, entropy=True)
    assert torch.equal(out.token_log_probs, log_probs)
    assert torch.equal(out.token_entropy, entropy)
    parameters = list(model.parameters())
    upstream = torch.randn(2, 7, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad(out.token_log_probs, parameters, upstream)
    for grad, want in zip(grads, torch.autograd.grad(log_probs, parameters, upstream)):
        assert torch.equal(grad, want)
