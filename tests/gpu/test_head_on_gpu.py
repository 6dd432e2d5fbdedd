"""Tests of the loss head on a GPU: real vocabularies, memory, CUDA graphs, 64-bit offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.kernels import (
    cross_entropy,
    linear_cross_entropy,
    linear_divergence,
    linear_group_loss,
    linear_log_probs,
)
from ligermodels.kernels.loss_options import TOKEN_STATS
from ligermodels.layers import LossHead
from tests.gpu.synchronisation import captured, no_synchronisation
from tests.kernels import formulas
from tests.kernels.checks import as_tuple, compare, random
from tests.kernels.conftest import Place
from tests.kernels.linear_cross_entropy.head import head_loss, inputs, spy_on_the_plan
from tests.kernels.ops_table import LOSS_OPTIONS
from tests.kernels.ops_table import cross_entropy as logits_inputs
from tests.kernels.scratch import peak_scratch
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu


VOCABS = [32000, 128256, 151936, 256000, 262208]
MIB = 2**20


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def head(rows: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows + width + vocab)
    on_gpu = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(rows, width, dtype=torch.bfloat16, **on_gpu).requires_grad_()
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, **on_gpu) / width**0.5
    targets = torch.randint(vocab, (rows,), **on_gpu)
    targets[::5] = -100
    return hidden, weight.requires_grad_(), targets


class Called(torch.nn.Module):
    """A projection that the head must call, with a weight that is no parameter of it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.of_caller = (weight,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, *self.of_caller)


def close(ours: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Assert that the norms of the differences are within bfloat16's rounding."""
    for a, b in zip(ours, want):
        error, size = (a.double() - b.double()).norm(), b.double().norm()
        assert error <= 5e-3 * size, f"the error's norm is {error:.3e}, the result's {size:.3e}"


@pairwise(vocab=VOCABS, dtype=DTYPES, loss=[{}, LOSS_OPTIONS | {"ignore_index": -1}])
def test_vocabularies(vocab, dtype, loss) -> None:
    """Compare loss and gradients at real vocabularies, in chunks of rows and blocks of columns."""
    constant = ("class_weights",)

    def check(op, formula, made: dict) -> None:
        compare(op, formula, made, Place("cuda", dtype), constant=constant, exact_place="cuda")

    made = inputs((70,), 256, vocab, **loss)
    for options in (
        {"chunk_size": 32},
        {"reduction": "none"},
        # The budget is too small to keep a weight gradient or its float32 sum.
        {"max_scratch_bytes": 12 * MIB},
    ):
        check(head_loss, formulas.linear_cross_entropy, made | options)
    of_logits = {key: x for key, x in loss.items() if key in ("softcap", "logit_scale")}
    made = inputs((70,), 256, vocab, **of_logits) | {"entropy": True}
    for options in ({"chunk_size": 32}, {"max_scratch_bytes": 12 * MIB}):
        check(linear_log_probs, formulas.linear_log_probs, made | options)
    made = logits_inputs((70,), vocab, **loss)
    check(cross_entropy, formulas.cross_entropy, made)


@pairwise(vocab=VOCABS, dtype=DTYPES, softcap=[None, 30.0])
def test_gradients_off_the_targets(vocab, dtype, softcap) -> None:
    """Compare the small gradients of other classes, which the large ones at targets would hide."""
    rows = 40
    logits = random(rows, vocab, seed=8, scale=3.0).to("cuda", dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(0)).cuda()
    exact = logits.detach().double().requires_grad_()
    # In float16, a factor of 1 would make the small gradients underflow.
    upstream = random(rows, seed=3).to("cuda") * (60000 if dtype == torch.float16 else 1)
    options = {"reduction": "none", "softcap": softcap}
    (grad,) = torch.autograd.grad(
        cross_entropy(logits, targets, **options).loss, logits, upstream.float()
    )
    expected, *_ = formulas.cross_entropy(exact, targets, **options)
    (want,) = torch.autograd.grad(expected, exact, upstream)
    off = torch.arange(vocab, device="cuda") != targets[:, None]
    for half in (slice(0, vocab // 2), slice(vocab // 2, vocab)):
        ours, right = (x[:, half][off[:, half]].double() for x in (grad, want))
        error = float((ours - right).norm() / right.norm())
        limit = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 2e-3}[dtype]
        assert error <= limit, f"the relative error is {error:.2e}"


BUDGETS = [None, 16 * MIB, 32 * MIB, 64 * MIB, 300 * MIB, 700 * MIB]


def check_scratch(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], allowed: int) -> None:
    """Assert that forward and backward each stay within what is allowed."""
    for phase, scratch in zip(("forward", "backward"), peak_scratch(forward, leaves)):
        assert scratch <= allowed, f"{phase} holds {scratch / MIB:.1f} of {allowed / MIB:.1f} MiB"


@pairwise(
    budget=BUDGETS, frozen=[None, "hidden", "weight"], reduction=["mean", "none"], rows=[400, 8192]
)
def test_scratch_stays_in_the_budget(rows, budget, reduction, frozen) -> None:
    """Bound the peak memory in forward and backward, without inputs, outputs and gradients."""
    width, vocab = 512, 128256
    hidden, weight, targets = head(rows, width, vocab)
    if frozen:
        {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    options = {"reduction": reduction, "max_scratch_bytes": budget}
    accumulator = 0 if frozen == "weight" else weight.numel() * 4
    allowed = budget
    if budget is None:
        allowed = accumulator + 2**30 + 64 * rows + hidden.nbytes

    def forward() -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, **options).loss

    check_scratch(forward, (hidden, weight), allowed)


@pytest.mark.parametrize("max_valid", [None, 1000, 8192])
@pytest.mark.parametrize("budget", [32 * MIB, 300 * MIB, 700 * MIB])
def test_scratch_of_gathered_rows_and_of_log_probs(budget, max_valid) -> None:
    hidden, weight, targets = head(8192, 512, 128256)
    if max_valid == 1000:
        targets[1000:] = -100
    options = {"skip_ignored": True, "max_valid": max_valid, "max_scratch_bytes": budget}

    def loss() -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, **options).loss

    def log_probs() -> Tensor:
        return torch.stack(linear_log_probs(hidden, weight, targets, entropy=True, **options))

    for forward in (loss, log_probs):
        check_scratch(forward, (hidden, weight), budget)


Step = Callable[..., Tensor]


def step(op: Callable[..., Any] = linear_cross_entropy, **options: Any) -> Step:
    """Return a function that runs forward and backward of an op, and returns its first output."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        outputs = as_tuple(op(hidden, weight, targets, **options))
        total = torch.stack([x.square().sum() for x in outputs if x.requires_grad]).sum()
        total.backward()
        return outputs[0].detach()

    return run


def log_probs(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return linear_log_probs(*args, entropy=True, **options)


def asked(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return linear_cross_entropy(
        hidden,
        weight,
        targets,
        alternatives=torch.stack((targets, targets.clamp(min=0)), -1),
        return_token_stats=TOKEN_STATS,
        top_k=2,
        temperature=0.7,
        **options,
    )


def groups(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    def loss_function(tokens: Any, _: slice) -> Tensor:
        return tokens.log_probs.sum(-1).square().sum()

    sequences = hidden.view(8, -1, hidden.shape[-1]), weight, targets.view(8, -1)
    return linear_group_loss(*sequences, loss_function, **options)


def divergence(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    teacher = hidden.detach() * 2, weight.detach()
    return linear_divergence(hidden, weight, *teacher, mask=targets != -100, **options)


def replaced(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, ...]:
    with torch.device("meta"):
        head = LossHead(weight.shape[1], len(weight))
    head.proj = Called(weight)
    return head(hidden, targets, **options)


# With 512 rows of 64 and a vocabulary of 1000, both budgets are too small for a float32 sum of the
# weight gradient. The smaller one is also too small to keep the hidden gradient for backward.
BUDGET, SMALL = 200_000, 160_000
STEPS: dict[str, Step] = {
    "default": step(),
    "few rows": step(),
    "chunks": step(chunk_size=100),
    "budget": step(max_scratch_bytes=BUDGET),
    "small budget": step(max_scratch_bytes=SMALL),
    "replaced": step(replaced, chunk_size=100),
    "replaced, none": step(replaced, chunk_size=100, reduction="none", temperature=0.7),
    "weight gradient in forward": step(chunk_size=100, weight_grad_in_forward=True),
    "none, small budget": step(max_scratch_bytes=SMALL, reduction="none"),
    "options": step(chunk_size=100, label_smoothing=0.1, z_loss=1e-4, softcap=30.0),
    "stats": step(chunk_size=100, return_token_stats=True),
    "asked for by name, none": step(asked, chunk_size=100, reduction="none"),
    "groups": step(groups),
    "groups, small budget": step(groups, max_scratch_bytes=SMALL),
    "divergence, chunks": step(divergence, chunk_size=100, beta=0.0),
    "divergence, none": step(divergence, chunk_size=100, beta=None, reduction="none"),
    "skipping": step(chunk_size=100, skip_ignored=True, max_valid=450),
    "skipping, small budget": step(max_scratch_bytes=SMALL, skip_ignored=True, max_valid=450),
    "log-probabilities, small budget": step(log_probs, max_scratch_bytes=SMALL),
    "log-probabilities, skipping": step(
        log_probs, chunk_size=100, skip_ignored=True, max_valid=450
    ),
}


def head_for(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a head; its few rows are fewer than the hidden size."""
    return head(48 if "few rows" in name else 512, 64, 1000)


@pytest.mark.parametrize("name", STEPS)
def test_no_host_synchronisation_and_captured_in_a_cuda_graph(name) -> None:
    """A captured step, replayed on other hidden states and targets, equals eager on those."""
    hidden, weight, targets = head_for(name)

    def step() -> Tensor:
        return STEPS[name](hidden, weight, targets)

    def clear() -> None:
        hidden.grad = weight.grad = None

    step()  # compiles the kernels
    with no_synchronisation():
        step()
    graph, made = captured(step, clear)
    with torch.no_grad():
        hidden.copy_(hidden.flip(0))
        targets.copy_(targets.roll(3))
    graph.replay()
    replayed = made.detach().clone(), hidden.grad.clone(), weight.grad.clone()
    clear()
    expected = step()
    close(replayed, (expected.detach(), hidden.grad, weight.grad))


def test_counting_waits_and_is_refused_under_capture() -> None:
    hidden, weight, targets = head(512, 64, 1000)
    counting = step(skip_ignored=True)
    counting(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronisation():
        counting(hidden, weight, targets)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="pass max_valid"), torch.cuda.graph(graph):
        counting(hidden, weight, targets)


def test_a_chunk_past_two_to_the_31_logits() -> None:
    """Row offsets have 64 bits: one chunk of more than 2^31 logits equals many small ones."""
    rows, width, vocab = 8400, 64, 256000
    assert rows * vocab > 2**31
    hidden, weight, targets = head(rows, width, vocab)
    upstream = torch.randn(2, rows, device="cuda")
    results = []
    for chunk_size in (rows, 1000):
        out = linear_cross_entropy(
            hidden, weight, targets, chunk_size=chunk_size, return_token_stats=True
        )
        assert torch.isfinite(out.token_loss).all()
        grads = torch.autograd.grad(out.loss, (hidden, weight))
        outputs = linear_log_probs(hidden, weight, targets, entropy=True, chunk_size=chunk_size)
        more = torch.autograd.grad(outputs, (hidden, weight), tuple(upstream))
        found = (*out[:5], *grads, *outputs, *more)
        # The last rows lie beyond 2^31 logits.
        last = [x[-10:] for x in (grads[0], *outputs, more[0])]
        results.append((out.correct, (*found, *last)))
        assert (last[0].abs().sum(1) > 0).any()
    (correct, whole), (wanted, parts) = results
    # Matrix products with different numbers of rows may round differently.
    assert (correct != wanted).sum() <= 2
    close(whole, parts)


def test_blocks_of_columns_past_two_to_the_31_logits(monkeypatch) -> None:
    """Offsets in a wide block of many rows have 64 bits. Only the last rows have targets."""
    rows, width, vocab = 16640, 8192, 262144
    columns = 131072
    plans = spy_on_the_plan(monkeypatch)
    hidden, weight, targets = head(rows, width, vocab)
    hidden.requires_grad_(False)
    targets[:-20] = -100
    # The budget is half of what a float32 sum of the weight gradient takes.
    budget = 64 * rows + 2 * rows * (columns + 256)
    results = []
    for options in ({"max_scratch_bytes": budget}, {"chunk_size": 4096}):
        loss = linear_cross_entropy(hidden, weight, targets, **options).loss
        grad = torch.autograd.grad(loss, weight)[0]
        results.append((loss, grad[:500], grad[columns - 500 : columns + 500], grad[-500:]))
    close(*results)
    assert (plans[0].vocab_block, plans[0].block_chunk_size) == (columns, rows)
    assert rows * columns > 2**31
