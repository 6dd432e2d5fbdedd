"""The strategies of the loss head: which products they make, and what they save for backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import cross_entropy, linear_cross_entropy
from tests.kernels import formulas
from tests.kernels.checks import as_tuple, check_repeatable, compare
from tests.kernels.conftest import BFLOAT16, INTERPRETING, PLACES, places
from tests.kernels.linear_cross_entropy.test_functions import (
    CUTS,
    ROWS,
    VOCAB,
    WIDE,
    WIDTH,
    formula,
    inputs,
    on,
    ours,
    small_budget,
)
from tests.pairwise import pairwise


@pairwise(
    indirect=["place"],
    place=PLACES,
    frozen=[
        ("hidden",),
        ("weight",),
        ("bias",),
        ("hidden", "weight"),
        ("hidden", "bias"),
        ("weight", "bias"),
    ],
    cut=CUTS,
    reduction=["none", "mean"],
)
def test_frozen_inputs_get_no_gradient(place, frozen, cut, reduction) -> None:
    width, chunk_size = CUTS[cut]
    made = inputs(width=width) | {"reduction": reduction, "chunk_size": chunk_size}
    compare(ours, formula, made, place, frozen=frozen)


# Which loops run depends on all three, so their product is tested.
@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
@pytest.mark.parametrize("width", [WIDTH, WIDE])
@pytest.mark.parametrize("reduction, again", [("mean", 0), ("none", 1)])
def test_number_of_products(float32_place, reduction, again, width) -> None:
    """There is one matrix product for the logits (two for "none") and one for each gradient."""
    for frozen in ((), ("hidden",), ("weight",), ("hidden", "weight")):
        made = on(float32_place, inputs(width=width, bias=False))
        for name in frozen:
            made[name].requires_grad_(False)
        with FlopCounterMode(display=False) as counter:
            loss, *_ = linear_cross_entropy(**made, reduction=reduction)
            if loss.requires_grad:
                loss.sum().backward()
        gradients = 2 - len(frozen)
        products = 1 + gradients + (again if gradients else 0)
        flops = products * 2 * ROWS * width * VOCAB
        assert counter.get_total_flops() == flops, f"frozen: {frozen}"


def test_twice_over_a_retained_graph(compiled_place) -> None:
    for reduction in ("none", "mean"):
        for width, chunk_size in CUTS.values():
            made = inputs(width=width) | {"reduction": reduction, "chunk_size": chunk_size}
            check_repeatable(ours, made, compiled_place)


@pytest.mark.parametrize("width", [WIDTH, WIDE])
def test_targets_may_change_before_backward(float32_place, width) -> None:
    """A caller may write the next batch's targets into the same buffer between the two passes."""
    made = on(float32_place, inputs(width=width))
    leaves = [made[name] for name in ("hidden", "weight", "bias")]
    expected = torch.autograd.grad(linear_cross_entropy(**made).loss, leaves)
    loss = linear_cross_entropy(**made).loss
    made["targets"].zero_()
    for grad, wanted in zip(torch.autograd.grad(loss, leaves), expected):
        assert torch.equal(grad, wanted)


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("place", places(BFLOAT16, gpu=(BFLOAT16,)), indirect=True)
def test_weight_gradient_is_accumulated_in_float32(place, cut) -> None:
    """In bfloat16, many chunks are no further from float64 than one. A bfloat16 sum would be."""
    rows, width, vocab = 256, 16, 8
    made = inputs((rows,), width, vocab, bias=False)
    exact = {
        k: v.bfloat16().double() if v.is_floating_point() else v
        for k, v in made.items()
        if v is not None
    }
    exact["weight"].requires_grad_()
    formulas.linear_cross_entropy(**exact)[0].backward()
    errors = []
    # With the least budget, each product covers few columns of the gradient and few rows.
    least = {"max_scratch_bytes": small_budget(made, place, 0)}
    for options in ({"chunk_size": rows}, {"chunk_size": 4} if cut == "rows" else least):
        leaves = on(place, made)
        linear_cross_entropy(**leaves, **options)[0].backward()
        grad = leaves["weight"].grad.double().cpu()
        errors.append(float((grad - exact["weight"].grad).square().mean().sqrt()))
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.skipif(INTERPRETING, reason="the interpreter runs one program after the other")
@pairwise(
    indirect=["place"],
    place=PLACES,
    reduction=["none", "mean"],
    cut=["few rows", "one chunk", "rows", "columns", "skipping"],
)
def test_bitwise_the_same_from_run_to_run(place, reduction, cut) -> None:
    rows, width = (WIDE, WIDE) if cut == "few rows" else (64, WIDTH)
    made = inputs((rows,), width, name="everything")
    options = {"reduction": reduction, "return_token_stats": True}
    options |= {
        "few rows": {},
        "one chunk": {},
        "rows": {"chunk_size": 9},
        "columns": {"max_scratch_bytes": small_budget(made, place, **options)},
        "skipping": {"chunk_size": 9, "skip_ignored": True, "max_valid": 60},
    }[cut]
    runs = []
    for _ in range(2):
        leaves = on(place, made)
        out = linear_cross_entropy(**leaves, **options)
        total = out.loss.sum()
        if reduction == "none":
            total = total + out.log_probs.square().sum() + out.entropy.square().sum()
        total.backward()
        runs.append((*as_tuple(out), *(leaves[k].grad for k in ("hidden", "weight", "bias"))))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cut", CUTS)
def test_selective_checkpointing_may_keep_the_logits(float32_place, cut) -> None:
    """Its second forward gets the stored logits, so their gradient does not take their place."""
    width, chunk_size = CUTS[cut]
    made = on(float32_place, inputs(width=width))
    leaves = [made[name] for name in ("hidden", "weight", "bias")]
    aten = torch.ops.aten
    kept = partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])

    def loss() -> torch.Tensor:
        return linear_cross_entropy(**made, chunk_size=chunk_size).loss

    expected = torch.autograd.grad(loss(), leaves)
    again = checkpoint(loss, use_reentrant=False, context_fn=kept)
    assert all(map(torch.equal, torch.autograd.grad(again, leaves), expected))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_loss_whose_gradient_is_dropped(cut, reduction) -> None:
    """A function of the user's after the loss may return None as its gradient."""
    width, chunk_size = CUTS[cut]
    made = inputs(width=width)
    leaves = [made[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    loss = linear_cross_entropy(**made, reduction=reduction, chunk_size=chunk_size).loss
    logits = (made["hidden"] @ made["weight"].t()).detach().requires_grad_()
    plain = cross_entropy(logits, made["targets"], reduction=reduction).loss
    for each in (loss, plain):
        (_NoGradient.apply(each).sum() + leaves[0].sum() + logits.sum()).backward()
    torch.testing.assert_close(leaves[0].grad, torch.full_like(leaves[0], 2.0))
    torch.testing.assert_close(logits.grad, torch.full_like(logits, 2.0))
    assert leaves[1].grad is None and leaves[2].grad is None


@pytest.mark.skipif(INTERPRETING, reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_gradient_in_forward(dtype, chunk_size) -> None:
    """Forward saves it in the weight's dtype, and no logits. The gradients stay what they were."""
    made = {k: x for k, x in inputs(bias=False).items() if x is not None}
    for name in ("hidden", "weight"):
        made[name] = made[name].detach().to(dtype).requires_grad_()
    leaves = [made["hidden"], made["weight"]]
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    grads = []
    for option in (False, True):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = linear_cross_entropy(
                **made, chunk_size=chunk_size, weight_grad_in_forward=option
            ).loss
        grads.append(torch.autograd.grad(loss, leaves))
    kept = torch.float32 if dtype == torch.float16 else dtype
    assert [x.dtype for x in saved if x.shape == (VOCAB, WIDTH)] == [kept]
    assert all(x.shape[-1:] != (VOCAB,) for x in saved)
    for one, other in zip(*grads):
        torch.testing.assert_close(
            one, other, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
        )
