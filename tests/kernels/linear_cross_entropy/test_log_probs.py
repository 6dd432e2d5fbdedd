"""Differentiable log-probabilities and entropy of a linear head, against softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_log_probs
from tests.kernels import formulas
from tests.kernels.checks import LAYOUTS, check_repeatable, compare, random
from tests.kernels.conftest import INTERPRETING
from tests.kernels.linear_cross_entropy.test_functions import ROWS, VOCAB, WIDTH, on, small_budget
from tests.kernels.linear_cross_entropy.test_functions import inputs as loss_inputs

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


@pytest.mark.parametrize("chunk_size", [None, 9])
@pytest.mark.parametrize("asked", PAIRS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_and_chunks(place, name, asked, chunk_size) -> None:
    """Each output alone and both at once, for random upstream gradients."""
    compare(*PAIRS[asked], inputs(name=name) | {"chunk_size": chunk_size}, place)


@pytest.mark.parametrize("extra", [0, 12])
@pytest.mark.parametrize("name", OPTIONS)
def test_budgets_without_an_accumulator(place, name, extra) -> None:
    made = inputs(name=name)
    budget = small_budget(made, place, extra, linear_log_probs, entropy=True)
    compare(both, formula, made | {"max_scratch_bytes": budget}, place)


@pytest.mark.parametrize(
    "shape, width, vocab", [((1,), 4, 5), ((5,), 1, 1), ((2, 3), 5, 11), ((), 3, 6), ((0,), 3, 4)]
)
def test_shapes(place, shape, width, vocab) -> None:
    compare(both, formula, inputs(shape, width, vocab) | {"chunk_size": 2}, place)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(place, layout) -> None:
    compare(both, formula, inputs((3, 4)) | {"chunk_size": 5}, place, layout=layout)


@pytest.mark.parametrize(
    "frozen", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("weight", "bias")], ids=str
)
def test_gradient_for_what_requires_it(place, frozen) -> None:
    compare(both, formula, inputs() | {"chunk_size": 8}, place, frozen=frozen)


def test_gradcheck() -> None:
    made = inputs((5,), 3, 7, "everything")
    leaves = [made.pop(k).requires_grad_() for k in ("hidden", "weight", "bias")]
    targets = made.pop("targets")

    def op(hidden, weight, bias):
        return linear_log_probs(hidden, weight, targets, bias, entropy=True, chunk_size=2, **made)

    assert torch.autograd.gradcheck(op, leaves)


def test_products_made(place) -> None:
    """Forward one, backward the logits again and a product for each gradient: four."""
    made = on(place, inputs(bias=False))
    for options in ({}, {"entropy": True}, {"entropy": True, "chunk_size": 9}):
        with FlopCounterMode(display=False) as counter:
            outputs = linear_log_probs(**made, **options)
            assert counter.get_total_flops() == 2 * ROWS * WIDTH * VOCAB
            sum(x.sum() for x in outputs if x is not None).backward()
        assert counter.get_total_flops() == 4 * 2 * ROWS * WIDTH * VOCAB


def test_no_grad(place) -> None:
    made = on(place, inputs())
    with torch.no_grad():
        outputs = both(**made)
    for a, b in zip(outputs, both(**made)):
        assert not a.requires_grad and b.requires_grad
        torch.testing.assert_close(a, b.detach())


def test_all_ignored(place) -> None:
    made = on(place, inputs())
    made["targets"] = torch.full_like(made["targets"], -100)
    outputs = both(**made, chunk_size=9)
    sum(x.sum() for x in outputs).backward()
    for x in (*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))):
        assert torch.equal(x, torch.zeros_like(x))


def test_a_masked_vocabulary(place) -> None:
    """Classes at -infinity: probability 0, finite outputs, finite gradients, none for them."""
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


def test_twice_over_a_retained_graph(place) -> None:
    check_repeatable(both, inputs() | {"chunk_size": 9}, place)


@pytest.mark.parametrize("chunk_size", [1, 5, 23, 100])
def test_any_chunk_gives_the_same(place, chunk_size) -> None:
    results = []
    for chunk in (None, chunk_size):
        made = on(place, inputs())
        outputs = both(**made, chunk_size=chunk)
        sum(x.square().sum() for x in outputs).backward()
        results.append((*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))))
    tolerance = 1e-2 if place.dtype == torch.bfloat16 else 1e-5
    for a, b in zip(*results):
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
def test_autocast(place, inside) -> None:
    if place.dtype != torch.float32:
        pytest.skip("autocast is for float32 leaves")
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
@pytest.mark.parametrize("asked", PAIRS)
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_compiled_equals_eager(place, asked, cut) -> None:
    if place.dtype == torch.float64:
        pytest.skip("float32 tells")
    torch._dynamo.reset()
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    op, _ = PAIRS[asked]
    # A least budget makes many pieces, each of which is traced: of five rows alone.
    source = inputs((5,) if cut == "columns" else (ROWS,), name="everything")
    options = {"chunk_size": 9}
    if cut == "columns":
        options = {"max_scratch_bytes": small_budget(source, place, 3, op)}
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


@pytest.mark.parametrize("target", [-1, VOCAB, 2**40])
def test_target_out_of_range_is_an_error_on_the_cpu(target) -> None:
    made = inputs(bias=False)
    made["targets"][4] = target
    with pytest.raises(IndexError, match=rf"^cross entropy: target {target} at flat position 4"):
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
