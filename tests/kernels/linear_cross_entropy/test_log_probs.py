"""Differentiable log-probabilities and entropy of a linear head, against softmax in float64.

`test_grid.py` tests sizes, layouts, frozen inputs, autocast's gradients and retained graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_log_probs
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import BFLOAT16, FLOAT32, INTERPRETING, PLACES, places
from tests.kernels.linear_cross_entropy.test_functions import (
    FEW,
    ROWS,
    VOCAB,
    WIDTH,
    on,
    small_budget,
)
from tests.kernels.linear_cross_entropy.test_functions import inputs as loss_inputs
from tests.kernels.test_cross_entropy import OUT_OF_RANGE
from tests.pairwise import pairwise

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "ignored in the vocabulary": {"ignore_index": 3},
    "everything": {"softcap": 4.0, "logit_scale": 1.7, "ignore_index": -1},
}


def inputs(shape=(ROWS,), width=WIDTH, vocab=VOCAB, name="plain", bias=True) -> dict:
    made = loss_inputs(shape, width, vocab, bias=bias) | OPTIONS[name]
    ignore_index = made.get("ignore_index", -100)
    made["targets"] = made["targets"].masked_fill(made["targets"] == -100, ignore_index)
    return made


def both(**kwargs) -> tuple[torch.Tensor, ...]:
    return linear_log_probs(**kwargs, entropy=True)


def alone(**kwargs) -> tuple[torch.Tensor, ...]:
    log_probs, entropy = linear_log_probs(**kwargs)
    assert entropy is None
    return (log_probs,)


def entropy_alone(**kwargs) -> torch.Tensor:
    return linear_log_probs(**kwargs, entropy=True)[1]


def formula(*, chunk_size=None, max_scratch_bytes=None, **kwargs) -> tuple[torch.Tensor, ...]:
    return formulas.linear_log_probs(**kwargs, entropy=True)


def formula_alone(**kwargs) -> tuple[torch.Tensor, ...]:
    return formula(**kwargs)[:1]


def entropy_formula(**kwargs) -> torch.Tensor:
    return formula(**kwargs)[1]


PAIRS = {
    "both": (both, formula),
    "log-probabilities": (alone, formula_alone),
    "entropy": (entropy_alone, entropy_formula),
}


@pairwise(indirect=["place"], place=PLACES, name=OPTIONS, asked=PAIRS, chunk_size=[None, 9])
def test_options_and_chunks(place, name, asked, chunk_size) -> None:
    """Compare each output alone and both together, for random upstream gradients."""
    compare(*PAIRS[asked], inputs(name=name) | {"chunk_size": chunk_size}, place)


@pairwise(indirect=["place"], place=PLACES, name=OPTIONS, extra=[0, 12])
def test_budgets_without_an_accumulator(place, name, extra) -> None:
    made = inputs((WIDTH + 2,), name=name) if extra else inputs(*FEW, name)
    budget = small_budget(made, place, extra, linear_log_probs, entropy=True)
    compare(both, formula, made | {"max_scratch_bytes": budget}, place)


def test_one_hidden_column(float32_place) -> None:
    compare(both, formula, inputs((5,), 1, 1) | {"chunk_size": 2}, float32_place)


def test_gradcheck() -> None:
    made = inputs((5,), 3, 7, "everything")
    leaves = [made.pop(k).requires_grad_() for k in ("hidden", "weight", "bias")]
    targets = made.pop("targets")

    def op(hidden, weight, bias):
        return linear_log_probs(hidden, weight, targets, bias, entropy=True, chunk_size=2, **made)

    assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
def test_number_of_products(float32_place) -> None:
    """Forward makes one; backward makes the logits again and one product for each gradient."""
    made = on(float32_place, inputs(bias=False))
    for options in ({}, {"entropy": True}, {"entropy": True, "chunk_size": 9}):
        with FlopCounterMode(display=False) as counter:
            outputs = linear_log_probs(**made, **options)
            assert counter.get_total_flops() == 2 * ROWS * WIDTH * VOCAB
            sum(x.sum() for x in outputs if x is not None).backward()
        assert counter.get_total_flops() == 4 * 2 * ROWS * WIDTH * VOCAB


def test_no_grad(float32_place) -> None:
    made = on(float32_place, inputs())
    with torch.no_grad():
        outputs = both(**made)
    for a, b in zip(outputs, both(**made)):
        assert not a.requires_grad and b.requires_grad
        torch.testing.assert_close(a, b.detach())


def test_all_ignored(float32_place) -> None:
    made = on(float32_place, inputs())
    made["targets"] = torch.full_like(made["targets"], -100)
    outputs = both(**made, chunk_size=9)
    sum(x.sum() for x in outputs).backward()
    for x in (*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))):
        assert torch.equal(x, torch.zeros_like(x))


def test_a_masked_vocabulary(place) -> None:
    """A class at -infinity has probability 0 and no gradient; all other results are finite."""
    made = on(place, inputs())
    masked = torch.tensor([1, 5, 50], device=place.device)
    made["targets"] = made["targets"].where(~torch.isin(made["targets"], masked), 7)
    made["bias"].data[masked] = float("-inf")
    outputs = both(**made, chunk_size=9)
    sum(x.square().sum() for x in outputs).backward()
    for x in (*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))):
        assert torch.isfinite(x).all()
    assert (made["bias"].grad[masked] == 0).all() and (made["weight"].grad[masked] == 0).all()
    rest = [i for i in range(VOCAB) if i not in masked.tolist()]
    fewer = {k: v.detach()[rest].double().cpu() for k, v in made.items() if k in ("weight", "bias")}
    renamed = {old: new for new, old in enumerate(rest)} | {-100: -100}
    targets = torch.tensor([renamed[t] for t in made["targets"].tolist()])
    want = formula(hidden=made["hidden"].detach().double().cpu(), targets=targets, **fewer)
    tolerance = 5e-2 if place.dtype == torch.bfloat16 else 1e-5
    for x, y in zip(outputs, want):
        torch.testing.assert_close(x.double().cpu(), y, rtol=tolerance, atol=tolerance)


def test_any_chunk_size_gives_the_same(compiled_place) -> None:
    results = {}
    for chunk_size in (None, 1, 5, 23, 100):
        made = on(compiled_place, inputs())
        outputs = both(**made, chunk_size=chunk_size)
        sum(x.square().sum() for x in outputs).backward()
        results[chunk_size] = (*outputs, *(made[k].grad for k in ("hidden", "weight", "bias")))
    tolerance = 1e-2 if compiled_place.dtype == torch.bfloat16 else 1e-5
    for chunk_size, result in results.items():
        for got, wanted in zip(result, results[None]):
            error = (got - wanted).abs()
            bound = tolerance * (wanted.abs() + wanted.abs().max())
            assert (error <= bound).all(), f"chunk_size={chunk_size}"


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
def test_autocast(float32_place, inside) -> None:
    place = float32_place
    made, exact = on(place, inputs()), inputs()
    leaves = [exact[k].requires_grad_() for k in ("hidden", "weight", "bias")]
    sum(x.square().sum() for x in formula(**exact)).backward()
    with torch.autocast(place.device, dtype=torch.bfloat16):
        outputs = both(**made)
        total = sum(x.square().sum() for x in outputs)
        if inside:
            total.backward()
    if not inside:
        total.backward()
    for ours, want in zip(outputs, formula(**exact)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double().cpu(), want.detach(), rtol=4e-2, atol=4e-2)
    for key, leaf in zip(("hidden", "weight", "bias"), leaves):
        grad = made[key].grad
        assert grad.dtype == torch.float32
        assert (grad.double().cpu() - leaf.grad).norm() / leaf.grad.norm() < 2e-2


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("compiled_place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize(
    ("asked", "cut"), [("both", "columns"), ("entropy", "rows"), ("log-probabilities", "rows")]
)
def test_compiled_equals_eager(compiled_place, asked, cut) -> None:
    place = compiled_place
    torch._dynamo.reset()
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    op, _ = PAIRS[asked]
    # The trace holds every piece, and a small budget makes many of them. Few rows keep it short.
    source = inputs((3,) if cut == "columns" else (ROWS,), WIDTH, 16, name="everything")
    options = {"chunk_size": 12}
    if cut == "columns":
        options = {"max_scratch_bytes": small_budget(source, place, 6, op)}
    results = []
    for function in (op, torch.compile(op, fullgraph=True, backend=backend)):
        made = on(place, source)
        outputs = function(**made, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstreams = [random(*x.shape, seed=5).to(x) for x in outputs]
        torch.autograd.backward(outputs, upstreams)
        results.append((*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))))
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance / 10)


def test_target_out_of_range_is_an_error_on_the_cpu() -> None:
    for target in (*OUT_OF_RANGE[2:], -1, VOCAB):
        made = inputs(bias=False)
        made["targets"][4] = target
        error = rf"^cross entropy: target {target} at flat position 4"
        with pytest.raises(IndexError, match=error):
            linear_log_probs(**made)


def test_refusals() -> None:
    made = inputs(bias=False)
    with pytest.raises(ValueError, match=r"^loss head: hidden .* expected the same"):
        linear_log_probs(made["hidden"], made["weight"][:, 1:], made["targets"])
    with pytest.raises(ValueError, match=r"^cross entropy: softcap"):
        linear_log_probs(**made, softcap=-1.0)
    for option, value in (("chunk_size", 0), ("max_scratch_bytes", 1), ("max_valid", 3)):
        with pytest.raises(ValueError, match=f"^loss head: {option}={value}"):
            linear_log_probs(**made, **{option: value})
    for hidden in (made["hidden"].long(), made["hidden"].half()):
        with pytest.raises(ValueError, match=r"^loss head: hidden is torch\."):
            linear_log_probs(**{**made, "hidden": hidden})
