"""The loops of the loss head within a budget: plan, products, results and peak memory."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_cross_entropy
from ligermodels.kernels.linear_cross_entropy.chunk_plan import ChunkPlan
from ligermodels.kernels.linear_cross_entropy.loops import GradSums, NeedsGrad
from tests.kernels.checks import compare, random
from tests.kernels.conftest import INTERPRETING, PLACES
from tests.kernels.linear_cross_entropy.test_functions import (
    FEW,
    ROWS,
    VOCAB,
    WIDTH,
    formula,
    inputs,
    on,
    ours,
    small_budget,
)
from tests.kernels.scratch import peak_scratch
from tests.kernels.test_cross_entropy import CONSTANT, OPTIONS
from tests.pairwise import pairwise


def spy_on_the_plan(monkeypatch) -> list[ChunkPlan]:
    """Return a list to which every later call of the op appends its plan."""
    module = import_module("ligermodels.kernels.linear_cross_entropy.functions")
    plans: list[ChunkPlan] = []
    inner = module.make_head

    def spy(*args, **kwargs):
        head = inner(*args, **kwargs)
        plans.append(head.args.plan)
        return head

    monkeypatch.setattr(module, "make_head", spy)
    return plans


def least_budget(made: dict, **options) -> int:
    """Return the least max_scratch_bytes that the op accepts, as its error message states it."""
    with pytest.raises(ValueError, match="at least") as error:
        linear_cross_entropy(**made, **options, max_scratch_bytes=1)
    return int(str(error.value).split()[-1])


def test_the_bias_gradient_of_a_chunk_is_not_rounded() -> None:
    """The sum of the first chunk needs more digits than bfloat16 has; the second takes 1 away."""
    small, low = 2.0**-9, torch.bfloat16
    hidden, weight = torch.ones(3, 2, dtype=low), torch.ones(4, 2, dtype=low)
    sums = GradSums(hidden, weight, None, NeedsGrad(bias=True), one_chunk=False)
    for rows, values in ((slice(0, 2), [1.0, small]), (slice(2, 3), [-1.0])):
        grad_logits = torch.tensor(values, dtype=low)[:, None].expand(-1, 4)
        sums.add(rows, hidden[rows], grad_logits)
    assert torch.equal(sums.bias, torch.full((4,), small))


def test_budget_reaches_the_chunks(compiled_place, monkeypatch) -> None:
    made = on(compiled_place, inputs((40,)))
    plans = spy_on_the_plan(monkeypatch)
    least = least_budget(made)
    with pytest.raises(ValueError, match="at least"):
        linear_cross_entropy(**made, max_scratch_bytes=least - 1)
    linear_cross_entropy(**made, max_scratch_bytes=least)
    linear_cross_entropy(**made, max_scratch_bytes=2**40)
    linear_cross_entropy(**made, max_scratch_bytes=1, chunk_size=9)
    assert plans[0].chunk_size == 1 and plans[0].vocab_block is not None
    assert plans[1:] == [ChunkPlan(40), ChunkPlan(9)]


@pairwise(
    indirect=["place"],
    place=PLACES,
    name=OPTIONS,
    reduction=["none", "sum", "mean"],
    extra=[0, 4],
)
def test_budgets_without_an_accumulator(place, monkeypatch, name, reduction, extra) -> None:
    """Compare every option if the weight gradient is computed in blocks of the vocabulary."""
    made = inputs((WIDTH + 2,), name=name) if extra else inputs(*FEW, name)
    budget = small_budget(made, place, extra, reduction=reduction)
    plans = spy_on_the_plan(monkeypatch)
    made |= {"reduction": reduction, "max_scratch_bytes": budget}
    compare(ours, formula, made, place, constant=CONSTANT)
    assert all(plan.vocab_block is not None for plan in plans)


@pairwise(
    indirect=["place"],
    place=PLACES,
    frozen=[("hidden",), ("bias",), ("hidden", "bias")],
    bias=[False, True],
    reduction=["none", "mean"],
)
def test_frozen_without_an_accumulator(place, frozen, reduction, bias) -> None:
    made = inputs(*FEW, bias=bias)
    if not bias:
        frozen = tuple(name for name in frozen if name != "bias")
    leaves = on(place, made)
    for key in frozen:
        leaves[key].requires_grad_(False)
    made |= {
        "reduction": reduction,
        "max_scratch_bytes": least_budget(leaves, reduction=reduction) + 60,
    }
    compare(ours, formula, made, place, frozen=frozen)


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_number_of_products_without_an_accumulator(float32_place, reduction) -> None:
    """The second loop needs one product more for its logits, and so does a backward of its own.

    The least budget has no room for the hidden gradient between forward and backward.
    """
    for frozen, products in {
        (): 5,
        ("hidden",): 3,
        ("weight",): 3,
        ("hidden", "weight"): 1,
    }.items():
        made = on(float32_place, inputs(bias=False))
        for name in frozen:
            made[name].requires_grad_(False)
        options = {"reduction": reduction}
        options["max_scratch_bytes"] = least_budget(made, **options)
        with FlopCounterMode(display=False) as counter:
            loss, *_ = linear_cross_entropy(**made, **options)
            if loss.requires_grad:
                loss.sum().backward()
        assert counter.get_total_flops() == products * 2 * ROWS * WIDTH * VOCAB, f"frozen: {frozen}"


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
def test_number_of_products_of_several_chunks(float32_place) -> None:
    """There are three, whether torch's own product or a registered op accumulates them."""
    made = on(float32_place, inputs(bias=False))
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(**made, chunk_size=9)[0].backward()
    assert counter.get_total_flops() == 3 * 2 * ROWS * WIDTH * VOCAB


def test_registered_products(place) -> None:
    """The registered ops pass torch.library's check and return float32 results."""
    a, b = (random(*shape).to(place.device, place.dtype) for shape in ((5, 7), (7, 3)))
    wide = torch.float64 if place.dtype == torch.float64 else torch.float32
    total = random(5, 3, seed=4).to(place.device, wide)
    ops = torch.ops.ligermodels
    torch.library.opcheck(ops.wide_product, (a, b))
    torch.library.opcheck(ops.accumulate_product, (total.clone(), a, b))
    expected = a.to(wide) @ b.to(wide)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    product = ops.wide_product(a, b)
    assert product.dtype == wide
    torch.testing.assert_close(product, expected, **tolerance)
    before = total.clone()
    ops.accumulate_product(total, a, b)
    torch.testing.assert_close(total, before + expected, **tolerance)


def head_of(
    dtype: torch.dtype, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, weight and targets of a head that is large beside 64 bytes a token."""
    vocab = 2000
    hidden, weight = random(rows, width, seed=1), random(vocab, width, seed=2)
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(0))
    targets[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


EVERYTHING = {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 0.1}


# What a step holds depends on all of these, so `make test-long` tests their product.
@pytest.mark.skipif(INTERPRETING, reason="this tests plain PyTorch")
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "dtype, rows, width",
    [
        (torch.float32, 64, 32),
        pytest.param(torch.float64, 64, 32, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, 64, 32, marks=pytest.mark.long),
        pytest.param(torch.float32, 30, 100, marks=pytest.mark.long),
        (torch.bfloat16, 30, 100),
        pytest.param(torch.float16, 30, 100, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_plain_pytorch_stays_in_the_budget(dtype, rows, width, reduction, stats) -> None:
    """The budget includes the copies of a chunk that plain PyTorch makes."""
    hidden, weight, targets = head_of(dtype, rows, width)
    budgets = (200_000, 500_000, 1_500_000, 20_000_000)
    for i, budget in enumerate(budgets):
        # Each budget meets both values in some case.
        skip_ignored = (i + stats) % 2 == 0

        def forward(skip_ignored: bool = skip_ignored, budget: int = budget) -> torch.Tensor:
            out = linear_cross_entropy(
                hidden,
                weight,
                targets,
                reduction=reduction,
                return_token_stats=stats,
                skip_ignored=skip_ignored,
                max_scratch_bytes=budget,
                **EVERYTHING,
            )
            with_entropy = stats and reduction == "none"
            return torch.stack((out.loss, out.entropy)) if with_entropy else out.loss

        for phase, held in zip(("forward", "backward"), peak_scratch(forward, (hidden, weight))):
            assert held <= budget, f"{phase}, skip_ignored={skip_ignored}: {held} of {budget}"


def test_few_rows_take_no_copy_of_the_weight_gradient(compiled_place) -> None:
    """Backward computes the weight gradient with its final scale, so it needs no scaled copy."""
    rows, width, vocab = 4, 1024, 2000
    place = compiled_place
    leaves = on(place, {"hidden": random(rows, width), "weight": random(vocab, width, seed=2)})
    targets = torch.arange(rows, device=place.device)

    def forward() -> torch.Tensor:
        return linear_cross_entropy(**leaves, targets=targets).loss

    scratch = max(peak_scratch(forward, (leaves["hidden"], leaves["weight"])))
    assert scratch < leaves["weight"].nbytes / 2


@pytest.mark.skipif(INTERPRETING, reason="the interpreter copies tensors at each launch")
@pairwise(
    frozen=["nothing", "hidden", "weight"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    reduction=["mean", "none"],
    sizes=[(60, 500, 400), (800, 900, 5)],
)
def test_backward_of_one_chunk_stays_in_the_budget(
    monkeypatch, sizes, reduction, dtype, frozen
) -> None:
    """Budgets go from the size of the logits to 30 times that, planned as for the kernels."""
    rows, width, vocab = sizes
    module = import_module("ligermodels.kernels.linear_cross_entropy.chunk_plan")
    monkeypatch.setattr(module, "wide_copies", lambda *_: (0, 0))
    plans = spy_on_the_plan(monkeypatch)
    hidden, weight, targets = head_of(dtype, rows, width)
    targets %= vocab
    leaves = {"hidden": hidden.detach(), "weight": weight[:vocab].detach()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    logits = rows * vocab * dtype.itemsize
    held = 0
    for percent in [*range(100, 300, 20), 400, 1000, 3000]:
        budget = logits * percent // 100 + 64 * rows

        def forward(budget: int = budget) -> torch.Tensor:
            return linear_cross_entropy(
                **leaves, targets=targets, reduction=reduction, max_scratch_bytes=budget
            ).loss

        plans.clear()
        _, backward = peak_scratch(forward, tuple(leaves.values()))
        if plans[0].vocab_block is None and plans[0].chunk_size >= rows:
            held += 1
            # If backward computes the logits again, plain PyTorch makes copies of them.
            again = reduction == "none" or not plans[0].grads_in_forward
            copies = 8 * 4 * rows * vocab if again else 0
            assert backward <= budget + copies, f"backward holds {backward} of {budget} bytes"
    assert held


@pytest.mark.skipif(INTERPRETING, reason="the interpreter copies tensors at each launch")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_budget_with_a_weight_in_column_order(compiled_place, reduction) -> None:
    """The weight gradient has the layout of the weight; otherwise autograd would copy it."""
    place = compiled_place
    hidden = random(200, 64, seed=1).to(place.dtype).to(place.device).requires_grad_()
    weight = random(64, 3000, seed=2).to(place.dtype).to(place.device).t().requires_grad_()
    targets = torch.arange(200, device=place.device)
    budget = 60 * weight.nbytes // 100
    options = {"reduction": reduction, "max_scratch_bytes": budget}

    def forward() -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, targets, **options).loss

    assert max(peak_scratch(forward, (hidden, weight))) <= budget
    assert weight.grad.stride() == weight.stride()
    expected = torch.autograd.grad(
        linear_cross_entropy(hidden, weight.contiguous(), targets, **options).loss.sum(), weight
    )
    torch.testing.assert_close(weight.grad, *expected)


def test_peak_scratch() -> None:
    """The gradient of a leaf is not scratch. All other memory at the peak is scratch."""
    x = torch.ones(1000, requires_grad=True)

    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            torch.zeros(3000)
            ctx.kept = torch.zeros(500)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            torch.zeros(2000)
            return grad.expand(1000).clone()

    forward, backward = peak_scratch(lambda: Hungry.apply(x), (x,))
    few = 100  # bytes that scalars may take
    assert 4 * 3000 <= forward <= 4 * 3000 + few
    assert 4 * 2500 <= backward <= 4 * 2500 + few
