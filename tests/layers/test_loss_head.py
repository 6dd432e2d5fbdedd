"""The loss head as a module: tying, swapping, freezing, logits, and the normalizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import LigerLlama
from ligermodels.layers import HeadOutput, LossHead
from ligermodels.models.llama import LlamaConfig
from tests.kernels import formulas
from tests.models.pairs import relative

HIDDEN, VOCAB, BATCH, SEQ = 20, 37, 3, 9


def make(tied: bool = False, bias: bool = False, **options: Any) -> tuple[LossHead, nn.Embedding]:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCAB, HIDDEN)
    head = LossHead(HIDDEN, VOCAB, bias=bias, tied_to=embedding if tied else None, **options)
    return head, embedding


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, SEQ, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    targets[0, 2:5] = -100
    return hidden.requires_grad_(), targets


def dense(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(loss, z-loss) of each token, all logits at once, in float64."""
    logits = logit_scale * F.linear(hidden.double(), weight.double(), bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        None if class_weights is None else class_weights.double(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    z = z_loss * logits.logsumexp(-1).square() * (targets != ignore_index)
    return flat.view(targets.shape) + z, z


def swap(head: LossHead) -> None:
    """A projection of another class with the same weights: it must be called."""
    swapped = Counting(HIDDEN, VOCAB, bias=head.proj.bias is not None)
    swapped.load_state_dict(head.proj.state_dict())
    head.proj = swapped


class Counting(nn.Linear):
    rows: list[int]

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__.setdefault("rows", []).append(len(x))
        return super().forward(x)


KINDS = ["own", "own, bias", "tied", "swapped", "swapped, bias"]


def build(kind: str, **options: Any) -> tuple[LossHead, Tensor, Tensor | None]:
    head, _ = make("tied" in kind, "bias" in kind, **options)
    if "swapped" in kind:
        swap(head)
    return head, head.weight, None if "tied" in kind else head.proj.bias


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 0.05},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "class weights": {"class_weights": torch.linspace(0.1, 2.0, VOCAB)},
    "all": {
        "label_smoothing": 0.1,
        "z_loss": 0.02,
        "softcap": 4.0,
        "logit_scale": 1.7,
    },
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_loss(kind: str, options: str, reduction: str) -> None:
    """Value and gradients under a random upstream gradient, in chunks of five rows."""
    given = OPTIONS[options]
    head, weight, bias = build(kind)
    hidden, targets = data()
    out = head(hidden, targets, reduction=reduction, chunk_size=5, return_token_loss=True, **given)
    assert isinstance(out, HeadOutput)

    exact = hidden.detach().double().requires_grad_()
    weight64 = weight.detach().double().requires_grad_()
    bias64 = None if bias is None else bias.detach().double().requires_grad_()
    loss, z = dense(exact, weight64, targets, bias64, **given)
    valid = targets != -100
    divisor = valid.sum().double()
    if "class_weights" in given:
        divisor = given["class_weights"].double()[targets[valid]].sum()
    expected, expected_z = loss, z
    if reduction != "none":
        expected, expected_z = loss.sum(), z.sum()
    if reduction == "mean":
        expected, expected_z = expected / divisor, expected_z / divisor

    assert out.num_valid.item() == valid.sum().item()
    assert out.num_valid.shape == ()
    assert out.loss.shape == expected.shape
    assert relative(out.loss, expected) <= 1e-6
    assert relative(out.z_loss, expected_z) <= 1e-6
    assert out.token_loss is not None
    assert relative(out.token_loss, loss) <= 1e-6
    assert not out.z_loss.requires_grad
    upstream = torch.randn(out.loss.shape, generator=torch.Generator().manual_seed(2))
    leaves, wanted = [hidden, weight], [exact, weight64]
    if bias is not None and bias64 is not None:
        leaves, wanted = [*leaves, bias], [*wanted, bias64]
    grads = torch.autograd.grad(out.loss, leaves, upstream)
    reference = torch.autograd.grad(expected, wanted, upstream.double())
    for grad, want in zip(grads, reference):
        assert relative(grad, want) <= 2e-6


def test_the_output_holds_nothing_unasked() -> None:
    head, _ = make()
    out = head(*data())
    for x in (out.token_loss, out.token_log_probs, out.token_entropy, out.token_correct):
        assert x is None
    assert out.loss.shape == out.z_loss.shape == out.num_valid.shape == ()
    assert out.num_valid.dtype == torch.int64
    assert out.z_loss.item() == 0


def dense_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, entropy, correct) of each token, all logits at once, in float64."""
    return formulas.token_stats(
        F.linear(hidden.double(), weight.double(), bias), targets, **options
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_token_stats(kind: str, reduction: str) -> None:
    """Beside the loss, whatever the projection; with "none" they are differentiable."""
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
    """The head's own options hold; what is about the loss alone stays out."""
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("num_valid", [None, 25])
def test_skipping_ignored_targets(kind: str, reduction: str, num_valid: int | None) -> None:
    """Whatever the projection: the same outputs and gradients from the rows that count."""
    head, weight, _ = build(kind, z_loss=0.1, reduction=reduction, chunk_size=10)
    hidden, targets = data()
    results = []
    for options in ({}, {"skip_ignored": True, "num_valid": num_valid}):
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
        assert sum(rows) == 3 * BATCH * SEQ + 3 * (num_valid or 24)
    with pytest.raises(ValueError, match="num_valid=23, but 24 targets"):
        head(hidden, targets, skip_ignored=True, num_valid=23)


def test_token_stats_through_a_model() -> None:
    """A wrapped model is asked through forward: then log-probabilities have their gradients too."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str) -> None:
    head, weight, bias = build(kind, softcap=2.0, logit_scale=0.7)
    hidden, _ = data()
    expected = 2.0 * torch.tanh(0.7 * F.linear(hidden, weight, bias) / 2.0)
    assert relative(head.logits(hidden), expected) <= 1e-6
    assert head.logits(hidden[:, -1]).shape == (BATCH, VOCAB)


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


def test_a_tie_follows_the_embedding() -> None:
    """Through loading with assign, conversion, copies and pickles: none keeps the tensor."""
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["body", "head", "both"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_only_where_required(kind: str, frozen: str, reduction: str) -> None:
    head, weight, bias = build(kind)
    hidden, targets = data()
    options = {"reduction": reduction, "chunk_size": 5}
    parameters = [weight] if bias is None else [weight, bias]
    full = head(hidden, targets, **options).loss.sum()
    wanted = torch.autograd.grad(full, [hidden, *parameters])
    hidden = hidden.detach().requires_grad_(frozen == "head")
    for parameter in parameters:
        parameter.requires_grad_(frozen == "body")
    loss = head(hidden, targets, **options).loss.sum()
    assert loss.item() == pytest.approx(full.item(), rel=1e-6)
    if frozen == "both":
        assert not loss.requires_grad
        return
    loss.backward()
    for tensor, want in zip([hidden, *parameters], wanted):
        if tensor.requires_grad:
            assert relative(tensor.grad, want) <= 1e-6
        else:
            assert tensor.grad is None


def test_a_swapped_head_is_called_chunk_by_chunk() -> None:
    head, _, _ = build("swapped")
    hidden, targets = data()
    loss = head(hidden, targets, chunk_size=10).loss
    assert head.proj.rows == [10, 10, 7]
    loss.backward()
    assert sorted(head.proj.rows) == sorted(2 * [10, 10, 7])  # once more in backward
    head.proj.rows.clear()
    # Rows of 37 logits in float32, their gradient and copies: room for eight rows or so.
    head(hidden, targets, max_scratch_bytes=8 * 24 * VOCAB + 64 * BATCH * SEQ)
    assert max(head.proj.rows) == 8
    assert sum(head.proj.rows) == BATCH * SEQ


def test_logits_call_a_swapped_head_that_has_no_weight() -> None:
    head, _, _ = build("own")
    hidden, _ = data()
    expected = head.logits(hidden)
    head.proj = nn.Sequential(head.proj)
    assert torch.equal(head.logits(hidden), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_does_not_depend_on_the_chunk(kind: str) -> None:
    head, weight, _ = build(kind)
    hidden, targets = data()
    results = []
    for chunk in (1, 4, BATCH * SEQ, 1000, None):
        loss = head(hidden, targets, chunk_size=chunk).loss
        results.append((loss, *torch.autograd.grad(loss, [hidden, weight])))
    for result in results[1:]:
        for a, b in zip(result, results[0]):
            assert relative(a, b) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_accumulation_with_a_normalizer_equals_one_batch(kind: str, as_tensor: bool) -> None:
    head, weight, _ = build(kind)
    hidden, targets = data()
    big = head(hidden, targets)
    wanted = torch.autograd.grad(big.loss, [hidden, weight])
    count: Any = big.num_valid if as_tensor else int(big.num_valid)
    total = torch.zeros(())
    hidden.grad = weight.grad = None
    for row in range(BATCH):  # of which the first has fewer valid targets
        loss = head(hidden[row], targets[row], normalizer=count).loss
        loss.backward()
        total += loss.detach()
    assert total.item() == pytest.approx(big.loss.item(), rel=1e-6)
    for leaf, want in zip((hidden, weight), wanted):
        assert relative(leaf.grad, want) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_targets_ignored(kind: str, reduction: str) -> None:
    head, weight, _ = build(kind)
    hidden, targets = data()
    out = head(hidden, torch.full_like(targets, -100), reduction=reduction, z_loss=0.1)
    out.loss.sum().backward()
    assert out.num_valid == 0
    assert out.loss.abs().sum() == 0
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


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


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    head, weight, bias = build(kind)
    hidden, targets = data()
    exact = head(hidden, targets).loss
    wanted = torch.autograd.grad(exact, [hidden, weight])
    with torch.autocast("cpu", torch.bfloat16):
        out = head(hidden, targets)
        logits = F.linear(hidden, weight, bias).float()
        eager = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert out.loss.dtype == torch.float32
    grads = torch.autograd.grad(out.loss, [hidden, weight])
    theirs = torch.autograd.grad(eager, [hidden, weight])
    assert abs(out.loss - exact) <= 1.2 * abs(eager - exact) + 1e-3
    for grad, their, want in zip(grads, theirs, wanted):
        assert grad.dtype == torch.float32
        assert relative(grad, want) <= 1.2 * relative(their, want)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager(kind: str) -> None:
    head, weight, _ = build(kind)
    if "swapped" in kind:
        head.proj.forward = nn.Linear.forward.__get__(head.proj)  # nothing to count here
    hidden, targets = data()
    options = {"chunk_size": 10, "label_smoothing": 0.1, "z_loss": 0.01}
    loss = head(hidden, targets, **options).loss
    wanted = torch.autograd.grad(loss, [hidden, weight])
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    out = compiled(hidden, targets, **options)
    assert relative(out.loss, loss) <= 1e-6
    for grad, want in zip(torch.autograd.grad(out.loss, [hidden, weight]), wanted):
        assert relative(grad, want) <= 1e-6


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


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0)], ids=str)
def test_a_normalizer_of_nothing(normalizer: int | torch.Tensor) -> None:
    """Every micro-batch of a step may be without targets: its loss is 0, not 0 / 0."""
    output = LossHead(8, 5)(torch.randn(3, 8), torch.full((3,), -100), normalizer=normalizer)
    assert output.loss == 0
