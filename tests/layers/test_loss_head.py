"""The loss and gradients of the loss head, with its own, a tied or a replaced projection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ligermodels.layers import HeadOutput, LossHead, loss_head
from tests.layers.heads import (
    BATCH,
    HIDDEN,
    KINDS,
    SEQ,
    VOCAB,
    assert_compiled_equals_eager,
    build,
    data,
    dense,
    make,
)
from tests.models.pairs import relative
from tests.pairwise import pairwise

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


@pairwise(kind=KINDS, options=OPTIONS, reduction=["mean", "sum", "none"])
def test_equals_the_dense_loss(kind: str, options: str, reduction: str) -> None:
    """Compare the loss and its gradients in chunks of five rows, for a random upstream gradient."""
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


def test_the_output_is_a_tuple_with_the_loss_first() -> None:
    """The trainers of DeepSpeed and HF read output[0]; wrappers find its tensors as a pytree."""
    head, _ = make()
    out = head(*data(), return_token_loss=True)
    assert isinstance(out, tuple) and out[0] is out.loss
    leaves, structure = tree_flatten(out)
    assert [x is y for x, y in zip(leaves, out)] == [True] * len(out)
    assert isinstance(tree_unflatten(leaves, structure), HeadOutput)
    torch._dynamo.reset()
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    assert isinstance(compiled(*data()), HeadOutput)


@pairwise(kind=KINDS, frozen=["body", "head", "both"], reduction=["mean", "none"])
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


def test_a_planned_chunk_is_used_unless_a_chunk_or_a_budget_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Any] = []
    real = loss_head.linear_loss

    def recorded(*args: Any) -> Any:
        used.append(args[4].chunking[:2])
        return real(*args)

    monkeypatch.setattr(loss_head, "linear_loss", recorded)
    head, _, _ = build("own")
    hidden, targets = data()
    wanted = head(hidden, targets).loss
    head.planned_chunk_size = 3
    assert relative(head(hidden, targets).loss, wanted) <= 1e-6
    head(hidden, targets, chunk_size=4)
    head(hidden, targets, max_scratch_bytes=2**20)
    assert used == [(None, None), (3, None), (4, None), (None, 2**20)]


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_with_a_normalizer_equals_one_batch(kind: str) -> None:
    head, weight, _ = build(kind)
    hidden, targets = data()
    big = head(hidden, targets)
    wanted = torch.autograd.grad(big.loss, [hidden, weight])
    counts: tuple[Any, ...] = (big.num_valid, int(big.num_valid))
    for count in counts:
        total = torch.zeros(())
        hidden.grad = weight.grad = None
        for row in range(BATCH):  # the first row has fewer valid targets
            loss = head(hidden[row], targets[row], normalizer=count).loss
            loss.backward()
            total += loss.detach()
        assert total.item() == pytest.approx(big.loss.item(), rel=1e-6), count
        for leaf, want in zip((hidden, weight), wanted):
            assert relative(leaf.grad, want) <= 1e-6, count


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0)], ids=str)
def test_a_normalizer_of_nothing(normalizer: int | torch.Tensor) -> None:
    """If no micro-batch of a step has targets, the loss is 0, not 0 / 0."""
    output = LossHead(8, 5)(torch.randn(3, 8), torch.full((3,), -100), normalizer=normalizer)
    assert output.loss == 0


@pytest.mark.parametrize("kind", KINDS)
def test_all_targets_ignored(kind: str) -> None:
    head, weight, _ = build(kind)
    for reduction in ("mean", "sum", "none"):
        hidden, targets = data()
        weight.grad = None
        out = head(hidden, torch.full_like(targets, -100), reduction=reduction, z_loss=0.1)
        out.loss.sum().backward()
        assert out.num_valid == 0, reduction
        for x in (out.loss, hidden.grad, weight.grad):
            assert x.abs().sum() == 0, reduction


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
    if "replaced" in kind:
        head.proj.forward = nn.Linear.forward.__get__(head.proj)  # Counting cannot be traced
    hidden, targets = data()
    options = {"chunk_size": 14, "label_smoothing": 0.1, "z_loss": 0.01}
    assert_compiled_equals_eager(head, weight, hidden, targets, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_are_counted_once(kind: str) -> None:
    class Sums(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket is torch.ops.aten.sum and args[0].dtype == torch.bool:
                self.count += 1
            return func(*args, **kwargs or {})

    head, _, _ = build(kind)
    hidden, targets = data()
    with Sums() as sums:
        output = head(hidden, targets)
    assert sums.count == 1
    assert output.num_valid == (targets != -100).sum()


@pytest.mark.parametrize("kind", ["own", "replaced"])
def test_numbers_of_numpy_are_numbers(kind: str) -> None:
    head, _, _ = build(kind)
    hidden, targets = data()
    targets = targets.masked_fill(targets == -100, 2)
    numbers = {
        "label_smoothing": 0.25,
        "z_loss": 0.5,
        "softcap": 2.0,
        "logit_scale": 0.5,
        "normalizer": 3.0,
        "ignore_index": 2,
        "chunk_size": 5,
    }
    for name, value in numbers.items():
        made = np.int64(value) if isinstance(value, int) else np.float32(value)
        expected, found = (head(hidden, targets, **{name: x}).loss for x in (value, made))
        assert torch.equal(found, expected), name
        if name != "normalizer":
            options = LossHead(HIDDEN, VOCAB, **{name: made}).loss_options
            assert options == {name: value}
            assert type(options[name]) is type(value)
