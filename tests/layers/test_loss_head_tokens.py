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
@pytest.mark.parametrize("skip_ignored", [False, True])
def test_what_can_be_asked_by_name(kind: str, skip_ignored: bool) -> None:
    """All projections return it, in the shape of the targets and with gradients."""
    head, weight, bias = build(kind, softcap=3.0, logit_scale=1.3, temperature=0.7)
    hidden, targets = data()
    alternatives = torch.stack((targets.clamp(min=0), targets * 0 + 5, targets * 0 - 1), -1)
    out = head(
        hidden,
        targets,
        reduction="none",
        chunk_size=5,
        return_token_stats=["sum_sq_probs", "mean_logits"],
        alternatives=alternatives,
        top_k=2,
        skip_ignored=skip_ignored,
    )
    assert out.token_log_probs is out.token_entropy is out.token_correct is None
    logits = 1.3 * F.linear(hidden, weight, bias)
    t = 3.0 * torch.tanh(logits / 3.0) / 0.7
    valid, log_p = targets != -100, t.log_softmax(-1)
    wanted = {
        "sum_sq_probs": log_p.exp().square().sum(-1) * valid,
        "mean_logits": t.mean(-1) * valid,
        "alternative_log_probs": log_p.gather(-1, alternatives.clamp(min=0))
        * (valid[..., None] & (alternatives >= 0)),
        "top_log_probs": log_p.topk(2).values * valid[..., None],
    }
    got = {name: getattr(out, f"token_{name}") for name in wanted}
    for name, want in wanted.items():
        assert relative(got[name], want) <= 1e-6, name
        grads = torch.autograd.grad(got[name].square().sum(), [hidden, weight], retain_graph=True)
        exact = torch.autograd.grad(want.square().sum(), [hidden, weight], retain_graph=True)
        for grad, other in zip(grads, exact):
            assert relative(grad, other) <= 1e-5, name
    assert torch.equal(out.token_top_ids[valid], t.topk(2).indices[valid])


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_asked_by_name_under_autocast(kind: str) -> None:
    """The products are in bfloat16; the values and the gradients stay in float32."""
    head, weight, _ = build(kind, softcap=3.0, temperature=0.7)
    hidden, targets = data()
    asked = {
        "return_token_stats": ["log_probs", "entropy", "sum_sq_probs", "mean_logits"],
        "alternatives": torch.stack((targets.clamp(min=0), targets * 0 + 5), -1),
        "top_k": 2,
    }

    def values() -> list[torch.Tensor]:
        out = head(hidden, targets, reduction="none", chunk_size=5, **asked)
        names = ("log_probs", "entropy", "sum_sq_probs", "mean_logits", "alternative_log_probs")
        made = [getattr(out, f"token_{name}") for name in names]
        whole = head.from_log_probs(hidden, targets, lambda t, _: t.log_probs.square().sum())
        return [*made, out.token_top_log_probs, whole]

    exact = values()
    with torch.autocast("cpu", torch.bfloat16):
        made = values()
    for x, y in zip(made, exact):
        assert x.dtype == torch.float32 and relative(x, y) <= 1e-2
    pairs = [
        torch.autograd.grad(sum(x.square().sum() for x in each), [hidden, weight])
        for each in (made, exact)
    ]
    for grad, want in zip(*pairs):
        assert grad.dtype == torch.float32 and relative(grad, want) <= 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_token_weights(kind: str) -> None:
    head, weight, _ = build(kind)
    hidden, targets = data()
    weights = torch.linspace(-1, 1, targets.numel()).view_as(targets)
    each, each_z, *_ = head(hidden, targets, reduction="none", z_loss=0.1)
    out = head(hidden, targets, token_weights=weights, return_token_loss=True, z_loss=0.1)
    wanted = (each * weights).sum() / out.num_valid
    assert relative(out.z_loss, (each_z * weights).sum() / out.num_valid) <= 1e-6
    assert relative(out.loss, wanted) <= 1e-6
    assert relative(out.token_loss, each * weights) <= 1e-6
    grads = torch.autograd.grad(out.loss, [hidden, weight], retain_graph=True)
    for grad, want in zip(grads, torch.autograd.grad(wanted, [hidden, weight])):
        assert relative(grad, want) <= 1e-5
    # What stands at ignored targets is not looked at.
    odd = weights.masked_fill(targets == -100, torch.nan)
    for options in ({}, {"reduction": "none"}, {"skip_ignored": True}):
        losses = [head(hidden, targets, token_weights=x, **options).loss for x in (weights, odd)]
        assert torch.equal(*losses)
        assert torch.equal(*(torch.autograd.grad(x.sum(), hidden)[0] for x in losses))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_another_dtype(kind: str) -> None:
    """A plain projection computes them in this dtype; the weights need not have it."""
    head, weight, bias = build(kind, softcap=3.0)
    hidden, _ = data()
    exact = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    logits = head.logits(hidden, dtype=torch.float64)
    assert logits.dtype == torch.float64 and head.logits(hidden).dtype == torch.float32
    error = relative(logits, 3.0 * torch.tanh(exact / 3.0))
    assert error <= (1e-6 if "replaced" in kind else 1e-14)


def test_the_outputs_of_trl() -> None:
    """The values that TRL's trainers take from a model, against TRL's own code."""
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    head, weight, bias = build("own, bias", softcap=3.0, logit_scale=1.3, temperature=0.7)
    hidden, targets = data()
    names = ("log_probs", "entropy", "correct", "sum_sq_probs", "mean_logits")
    out = head(hidden, targets, reduction="none", return_token_stats=names)
    valid = targets != -100
    theirs = kernels.ChunkedLogProbFunction.apply(
        hidden[valid], weight, bias, targets[valid], 0.7, 16, 3.0, 1.3
    )
    ours = (
        out.token_log_probs,
        out.token_entropy,
        out.token_sum_sq_probs.clamp(min=1e-30).log(),
        out.token_mean_logits,
    )
    for a, b in zip(ours, theirs):
        assert relative(a[valid], b) <= 1e-6
    assert torch.equal(out.token_correct[valid], theirs[-1])


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
    if "replaced" in kind:
        assert max(head.proj.rows) <= 10
        rows = head.proj.rows
        assert sum(rows) == 3 * BATCH * SEQ + 3 * (max_valid or 24)
    with pytest.raises(ValueError, match="max_valid=23, but 24 targets"):
        head(hidden, targets, skip_ignored=True, max_valid=23)


def tiny_model() -> LigerLlama:
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
    return LigerLlama(config)


def test_token_stats_through_a_model() -> None:
    """A wrapped model has only forward; its log-probabilities must have gradients, too."""
    model = tiny_model()
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


def test_a_loss_function_through_a_model() -> None:
    """The layers' own loss stays apart, as with reduction "none", and a plan's chunk is used."""
    model = tiny_model()
    block = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: (*block(*args, **kwargs), torch.tensor(0.5))
    model.head.planned_chunk_size = 14
    ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))
    seen = []

    def of_rows(tokens, rows):
        seen.append(rows)
        return tokens.log_probs.sum(1).square().sum() + tokens.entropy.sum()

    stats = ("log_probs", "entropy")
    out = model(ids, labels=ids, loss_function=of_rows, group_size=2, return_token_stats=stats)
    assert seen == [slice(0, 2), slice(2, 4)]
    assert out.auxiliary_loss == 0.5 and out.num_valid == 24 and out.token_log_probs is None
    tokens = model(ids, labels=ids, reduction="none", return_token_stats=stats)
    want = tokens.token_log_probs.sum(1).square().sum() + tokens.token_entropy.sum()
    assert relative(out.loss, want) <= 1e-6
    parameters = list(model.parameters())
    for grad, expected in zip(*(torch.autograd.grad(x, parameters) for x in (out.loss, want))):
        assert relative(grad, expected) <= 1e-5
