"""What a head computes and holds: its plan, its products, what it saves, and its peak memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_cross_entropy, linear_log_probs
from ligermodels.kernels.linear_cross_entropy.chunk_plan import ChunkPlan
from tests.kernels import formulas
from tests.kernels.checks import check_repeatable
from tests.kernels.conftest import BFLOAT16, INTERPRETING, places
from tests.kernels.linear_cross_entropy.head import (
    CUTS,
    LEAVES,
    ROWS,
    VOCAB,
    WIDTH,
    cut_inputs,
    head_loss,
    inputs,
    least_budget,
    on,
    spy_on_the_plan,
)
from tests.kernels.ops_table import LOSS_OPTIONS
from tests.kernels.scratch import peak_scratch

outside_kernels = pytest.mark.skipif(
    INTERPRETING, reason="this happens outside the kernels, whose tensors the interpreter copies"
)
NO_BIAS = inputs(bias=False)


def test_budget_reaches_the_chunks(compiled_place, monkeypatch) -> None:
    made = on(compiled_place, inputs((40,)))
    least = least_budget(made, head_loss)
    with pytest.raises(ValueError, match=f"at least {least}"):
        linear_cross_entropy(**made | {"max_scratch_bytes": least - 1})
    plans = spy_on_the_plan(monkeypatch)
    for given in (
        {"max_scratch_bytes": least},
        {"max_scratch_bytes": 2**40},
        {"max_scratch_bytes": 1, "chunk_size": 9},
    ):
        linear_cross_entropy(**made | given)
    assert plans[0].chunk_size == 1 and plans[0].vocab_block is not None
    assert plans[1:] == [ChunkPlan(40), ChunkPlan(9)]


# The op, its options, and how many products it makes for each choice of frozen inputs.
FROZEN = (), ("hidden",), ("weight",), ("hidden", "weight")
PRODUCTS: list[tuple[Any, dict[str, Any], tuple[int, ...]]] = [
    # One product for the logits (two for "none") and one for each gradient.
    (head_loss, {}, (3, 2, 2, 1)),
    (head_loss, {"width": 40}, (3, 2, 2, 1)),
    (head_loss, {"chunk_size": 9}, (3, 2, 2, 1)),
    (head_loss, {"token_weights": True}, (3, 2, 2, 1)),
    (head_loss, {"token_weights": True, "chunk_size": 9}, (3, 2, 2, 1)),
    (head_loss, {"reduction": "none"}, (4, 3, 3, 1)),
    (head_loss, {"reduction": "none", "width": 40}, (4, 3, 3, 1)),
    # Blocks of the vocabulary take the logits again, and so does a backward of its own. The least
    # budget has no room for the gradient of hidden between the passes.
    (head_loss, {"budget": 0}, (5, 3, 3, 1)),
    (head_loss, {"budget": 0, "reduction": "none"}, (5, 3, 3, 1)),
    (head_loss, {"budget": 14, "max_valid": 16}, (4,)),
    *((head_loss, {"max_valid": most}, (3,)) for most in (None, 18, 1000)),
    (linear_log_probs, {}, (4,)),
    (linear_log_probs, {"entropy": True, "chunk_size": 9}, (4,)),
    (linear_log_probs, {"max_valid": None}, (4,)),
]


@outside_kernels
@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("op, options, products", PRODUCTS)
def test_number_of_products(float32_place, op, options, products) -> None:
    given = {key: value for key, value in options.items() if key != "budget"}
    rows = ROWS
    if "max_valid" in options:
        given["skip_ignored"] = True
        rows = min(options["max_valid"] or 16, ROWS)
    for frozen, wanted in zip(FROZEN, products):
        made = on(float32_place, inputs(bias=False, **given), frozen)
        if "budget" in options:
            least = least_budget(made, op)
            made["max_scratch_bytes"] = least + options["budget"] * VOCAB * 4
        with FlopCounterMode(display=False) as counter:
            loss = op(**made)[0]
            if loss.requires_grad:
                loss.sum().backward()
        one = 2 * rows * options.get("width", WIDTH) * VOCAB
        assert counter.get_total_flops() == wanted * one, frozen


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("place", places(BFLOAT16, gpu=(BFLOAT16,)), indirect=True)
def test_weight_gradient_is_accumulated_in_float32(place, cut) -> None:
    """In bfloat16, many chunks are no further from float64 than one. A bfloat16 sum would be."""
    made = inputs((256,), 16, 8, bias=False)
    exact = {
        k: x.bfloat16().double() if k in LEAVES and x is not None else x for k, x in made.items()
    }
    exact["weight"].requires_grad_()
    formulas.linear_cross_entropy(**exact)[0].backward()
    # With the least budget, each product covers few columns of the gradient and few rows.
    least = {"max_scratch_bytes": least_budget(on(place, made), head_loss)}
    errors = []
    for options in ({"chunk_size": 256}, {"chunk_size": 4} if cut == "rows" else least):
        leaves = on(place, made | options)
        linear_cross_entropy(**leaves).loss.backward()
        grad = leaves["weight"].grad.double().cpu()
        errors.append(float((grad - exact["weight"].grad).square().mean().sqrt()))
    assert errors[1] <= 1.1 * errors[0]


@outside_kernels
@pytest.mark.parametrize("cut", CUTS)
def test_twice_over_a_retained_graph(compiled_place, cut) -> None:
    skipped = {"reduction": "none", "skip_ignored": True, "max_valid": 18} | LOSS_OPTIONS
    for options in ({}, skipped, LOSS_OPTIONS | {"return_token_stats": True}):
        made = cut_inputs(cut, compiled_place, head_loss, **options)
        check_repeatable(head_loss, on(compiled_place, made), compiled_place.dtype)


@pytest.mark.parametrize("cut", ["one chunk", "chunks", "few rows"])
def test_selective_checkpointing_may_keep_the_logits(float32_place, cut) -> None:
    """Its second forward gets the stored logits, so their gradient does not take their place."""
    made = on(float32_place, inputs(**CUTS[cut]))
    leaves = [made[name] for name in LEAVES]
    aten = torch.ops.aten
    kept = partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])

    def loss() -> torch.Tensor:
        return linear_cross_entropy(**made).loss

    expected = torch.autograd.grad(loss(), leaves)
    again = checkpoint(loss, use_reentrant=False, context_fn=kept)
    assert all(map(torch.equal, torch.autograd.grad(again, leaves), expected))


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_gradient_in_forward(dtype, chunk_size) -> None:
    """Forward saves it in the weight's dtype, and no logits. The gradients stay what they were."""
    made = {"chunk_size": chunk_size, "targets": NO_BIAS["targets"]}
    made |= {k: NO_BIAS[k].detach().to(dtype).requires_grad_() for k in LEAVES[:2]}
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    grads = []
    for option in (False, True):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = linear_cross_entropy(**made, weight_grad_in_forward=option).loss
        grads.append(torch.autograd.grad(loss, [made["hidden"], made["weight"]]))
    kept = torch.float32 if dtype == torch.float16 else dtype
    assert [x.dtype for x in saved if x.shape == (VOCAB, WIDTH)] == [kept]
    assert all(x.shape[-1:] != (VOCAB,) for x in saved)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*grads):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5)


def large_head(dtype: torch.dtype, rows: int, width: int, vocab: int = 2000) -> dict[str, Any]:
    """Return a head that is large beside 64 bytes a token."""
    made = inputs((rows,), width, vocab, bias=False, chunk_size=None)
    leaves = {name: made[name].to(dtype).requires_grad_() for name in LEAVES[:2]}
    return {"targets": made["targets"], **leaves}


LOSS = {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 0.1}
PAIRED = (torch.float32, True), (torch.bfloat16, False)


# What a step holds depends on all of these, so `make test-long` tests their product, of which the
# default run has the pairs.
@outside_kernels
@pytest.mark.parametrize(
    "dtype, reduction, stats",
    [
        pytest.param(
            dtype,
            reduction,
            stats,
            marks=[] if (dtype, stats == (reduction == "none")) in PAIRED else [pytest.mark.long],
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        for reduction in ("mean", "none")
        for stats in (False, True)
    ],
    ids=str,
)
def test_plain_pytorch_stays_in_the_budget(dtype, reduction, stats) -> None:
    """The budget includes the copies of a chunk that plain PyTorch makes."""
    rows, width = (30, 100) if dtype.itemsize == 2 else (64, 32)
    made = large_head(dtype, rows, width) | LOSS
    made |= {"reduction": reduction, "return_token_stats": stats}

    def forward() -> torch.Tensor:
        out = linear_cross_entropy(**made)
        with_entropy = stats and reduction == "none"
        return torch.stack((out.loss, out.entropy)) if with_entropy else out.loss

    for i, budget in enumerate((200_000, 500_000, 1_500_000, 20_000_000)):
        # Each budget meets both values in some case.
        made.update(skip_ignored=(i + stats) % 2 == 0, max_scratch_bytes=budget)
        held = peak_scratch(forward, (made["hidden"], made["weight"]))
        assert max(held) <= budget, f"forward and backward hold {held} of {budget}"


@outside_kernels
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_budget_with_a_weight_in_column_order(compiled_place, reduction) -> None:
    """The weight gradient has the layout of the weight; otherwise autograd would copy it."""
    made = on(compiled_place, inputs((25,), 32, 300, bias=False, reduction=reduction))
    weight = made["weight"] = made["weight"].detach().t().contiguous().t().requires_grad_()
    budget = made["max_scratch_bytes"] = 60 * weight.nbytes // 100

    def forward() -> torch.Tensor:
        return linear_cross_entropy(**made).loss

    assert max(peak_scratch(forward, (made["hidden"], weight))) <= budget
    assert weight.grad.stride() == weight.stride()
    loss = linear_cross_entropy(**made | {"weight": weight.contiguous()}).loss.sum()
    torch.testing.assert_close(weight.grad, *torch.autograd.grad(loss, weight))
