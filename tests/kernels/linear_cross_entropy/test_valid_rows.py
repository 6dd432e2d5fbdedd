"""skip_ignored: rows with an ignored target enter no matrix product, and results stay the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_cross_entropy, linear_log_probs
from ligermodels.kernels.linear_cross_entropy.valid_rows import (
    gather,
    gather_targets,
    scatter,
    valid_rows,
)
from ligermodels.kernels.loss_options import ChunkOptions
from tests.kernels.checks import as_tuple, check_repeatable, compare, random
from tests.kernels.conftest import BFLOAT16, FLOAT32, INTERPRETING, PLACES, places
from tests.kernels.linear_cross_entropy.test_functions import (
    CONSTANT,
    ROWS,
    VOCAB,
    WIDTH,
    formula,
    inputs,
    on,
    small_budget,
)
from tests.kernels.linear_cross_entropy.test_token_stats import linear_formula, linear_stats
from tests.kernels.test_cross_entropy import OPTIONS
from tests.pairwise import pairwise

# The larger bounds exceed the number of valid targets, so the rows taken include padding.
BOUNDS = {"counted": None, "exact": 16, "padded": 18, "more than rows": 1000}
LEAVES = ("hidden", "weight", "bias")


def skipping(**kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    return linear_cross_entropy(**kwargs, skip_ignored=True)[:2]


def valid(made: dict) -> int:
    return int((made["targets"] != made.get("ignore_index", -100)).sum())


@pairwise(
    indirect=["place"],
    place=PLACES,
    name=OPTIONS,
    bound=BOUNDS,
    chunk_size=[None, 5],
    reduction=["none", "mean"],
)
def test_options_against_the_formula(place, name, reduction, chunk_size, bound) -> None:
    made = inputs(name=name)
    assert valid(made) <= 16
    made |= {"reduction": reduction, "chunk_size": chunk_size}
    compare(
        lambda **kwargs: skipping(**kwargs, max_valid=BOUNDS[bound]),
        formula,
        made,
        place,
        constant=CONSTANT,
    )


@pairwise(
    indirect=["place"],
    place=PLACES,
    bound=["counted", "padded"],
    reduction=["none", "sum"],
    extra=[0, 12],
)
def test_budgets_without_an_accumulator(place, bound, reduction, extra) -> None:
    """A budget near the least makes blocks of the vocabulary, here over the gathered rows."""
    # The least budget computes few logits at a time, here of few.
    made = inputs(name="everything") if extra else inputs((ROWS,), 5, 17, "everything")
    options = {"skip_ignored": True, "max_valid": BOUNDS[bound], "reduction": reduction}
    budget = small_budget(made, place, extra, **options)
    compare(
        lambda **kwargs: skipping(**kwargs, max_valid=BOUNDS[bound], max_scratch_bytes=budget),
        formula,
        made | {"reduction": reduction},
        place,
        constant=CONSTANT,
    )


@pytest.mark.parametrize("bound", ["counted", "padded"])
def test_token_stats(compiled_place, bound) -> None:
    options = {"skip_ignored": True, "max_valid": BOUNDS[bound]}
    made = inputs(name="softcap") | {"reduction": "none", "chunk_size": 5}
    compare(
        lambda **kwargs: linear_stats(**kwargs, **options), linear_formula, made, compiled_place
    )


@pytest.mark.parametrize("bound", ["counted", "padded"])
def test_log_probs(compiled_place, bound) -> None:
    place = compiled_place
    results = []
    for options in ({}, {"skip_ignored": True, "max_valid": BOUNDS[bound]}):
        made = on(place, inputs((4, 6)))
        outputs = linear_log_probs(**made, **options, entropy=True, chunk_size=5)
        upstreams = [random(*x.shape, seed=4).to(x) for x in outputs]
        torch.autograd.backward(outputs, upstreams)
        results.append((*outputs, *(made[k].grad for k in LEAVES)))
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_one_chunk_gives_the_same_tokens(float32_place) -> None:
    made = on(float32_place, inputs((4, 6), name="z-loss"))
    plain = linear_cross_entropy(**made, return_token_stats=True)
    for bound in BOUNDS.values():
        skipped = linear_cross_entropy(
            **made, return_token_stats=True, skip_ignored=True, max_valid=bound
        )
        for a, b in zip(as_tuple(plain), as_tuple(skipped)):
            assert a.shape == b.shape and a.dtype == b.dtype, bound
            if a.dtype == torch.bool:
                assert torch.equal(a, b), bound
            else:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pairwise(
    indirect=["place"],
    place=PLACES,
    frozen=[("hidden",), ("weight",), ("weight", "bias")],
    reduction=["none", "mean"],
)
def test_frozen_inputs_get_no_gradient(place, frozen, reduction) -> None:
    made = inputs() | {"reduction": reduction, "chunk_size": 5}
    compare(skipping, formula, made, place, frozen=frozen)


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
def test_products_contain_valid_rows_only(float32_place) -> None:
    place = float32_place
    made = on(place, inputs(bias=False))
    taken = valid(made)
    assert taken < ROWS * 3 / 4
    for max_valid, rows in ((None, taken), (18, 18), (1000, ROWS)):
        options = {"skip_ignored": True, "max_valid": max_valid}
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(**made, **options)[0].backward()
        assert counter.get_total_flops() == 3 * 2 * rows * WIDTH * VOCAB
    options["max_valid"] = 16
    # There is room to keep the gradient of hidden until backward, but none for an accumulator.
    options["max_scratch_bytes"] = small_budget(inputs(bias=False), place, 14, **options)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(**made, **options)[0].backward()
    assert counter.get_total_flops() == 4 * 2 * 16 * WIDTH * VOCAB
    with FlopCounterMode(display=False) as counter:
        linear_log_probs(**made, skip_ignored=True)[0].sum().backward()
    assert counter.get_total_flops() == 4 * 2 * taken * WIDTH * VOCAB


@pairwise(
    indirect=["place"],
    place=PLACES,
    max_valid=[None, 0, 3],
    reduction=["none", "sum", "mean"],
    budget=[None, "small"],
)
def test_all_ignored(place, reduction, max_valid, budget) -> None:
    made = inputs()
    made["targets"] = torch.full_like(made["targets"], -100)
    options = {"skip_ignored": True, "max_valid": max_valid, "reduction": reduction}
    options |= {"z_loss": 0.1, "return_token_stats": True}
    if budget and max_valid:
        options["max_scratch_bytes"] = small_budget(made, place, 0, **options)
    made = on(place, made)
    out = linear_cross_entropy(**made, **options)
    out.loss.sum().backward()
    assert not out.correct.any()
    for x in (*out[:5], *(made[k].grad for k in LEAVES)):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0, 3)])
def test_few_tokens(float32_place, shape) -> None:
    made = on(float32_place, inputs(shape, 3, 4))
    for max_valid in (None, valid(made), 2):
        out = linear_cross_entropy(**made, skip_ignored=True, max_valid=max_valid)
        want = linear_cross_entropy(**made)
        torch.testing.assert_close(out.loss, want.loss)
        assert out.token_loss.shape == shape, max_valid
        grads = [torch.autograd.grad(x, [made[k] for k in LEAVES]) for x in (out.loss, want.loss)]
        for a, b in zip(*grads):
            torch.testing.assert_close(a, b)


def test_twice_over_a_retained_graph(compiled_place) -> None:
    for reduction in ("none", "mean"):
        made = inputs() | {"reduction": reduction, "chunk_size": 5, "max_valid": 18}
        check_repeatable(skipping, made, compiled_place)


def test_ignored_rows_are_never_read(float32_place) -> None:
    made = on(float32_place, inputs())
    ignored = made["targets"] == -100
    made["hidden"].data[ignored] = float("nan")
    for max_valid in (None, valid(made)):
        loss = linear_cross_entropy(**made, skip_ignored=True, max_valid=max_valid).loss
        grads = torch.autograd.grad(loss, [made[k] for k in LEAVES])
        for x in (loss, *grads):
            assert torch.isfinite(x).all()
        assert (grads[0][ignored] == 0).all()


def test_a_bound_too_small_is_an_error_on_the_cpu() -> None:
    made = inputs()
    count = valid(made)
    with pytest.raises(ValueError, match=rf"max_valid={count - 1}, but {count} targets"):
        linear_cross_entropy(**made, skip_ignored=True, max_valid=count - 1)


def test_rows_beyond_a_bound_too_small_are_nan() -> None:
    """A GPU returns NaN for them. This tests the parts of the op, which run on any device."""
    targets = torch.tensor([4, -100, 5, 6, -100])
    taken = torch.nonzero_static(targets != -100, size=2, fill_value=5).squeeze(1)
    values = scatter(torch.tensor([1.0, 2.0]), taken, targets, -100)
    assert values[3].isnan()
    assert values[:3].tolist() == [1.0, 0.0, 2.0] and values[4] == 0


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_bound_too_small_is_nan_under_compile(reduction) -> None:
    torch._dynamo.reset()
    op = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    made = inputs()
    options = {"skip_ignored": True, "max_valid": valid(made) - 1, "reduction": reduction}
    out = op(**made, **options)
    assert out.loss.isnan().sum() == 1 and out.token_loss.isnan().sum() == 1
    assert op(**made, **options | {"max_valid": valid(made)}).loss.isfinite().all()


@pytest.mark.gpu
def test_a_bound_too_small_is_nan_on_a_gpu() -> None:
    made = {k: v.cuda() for k, v in inputs().items()}
    options = {"skip_ignored": True, "max_valid": valid(made) - 1}
    for reduction in ("none", "sum", "mean"):
        out = linear_cross_entropy(**made, **options, reduction=reduction)
        assert out.loss.isnan().any() and out.token_loss.isnan().sum() == 1, reduction
    log_probs, _ = linear_log_probs(**made, **options)
    assert log_probs.isnan().sum() == 1


def test_rows_out_and_back() -> None:
    targets = torch.tensor([-100, 3, -100, 1, 2])
    taken = valid_rows(targets, -100, ChunkOptions(skip_ignored=True, max_valid=4))
    assert taken.tolist() == [1, 3, 4, 5]
    assert gather_targets(targets, taken, -100).tolist() == [3, 1, 2, -100]
    x = random(5, 2).requires_grad_()
    out = gather(x, taken)
    assert torch.equal(out[:3], x[[1, 3, 4]]) and (out[3] == 0).all()
    values = random(4, seed=3).requires_grad_()
    back = scatter(values, taken, targets, -100)
    assert torch.equal(back[[1, 3, 4]], values[:3]) and (back[[0, 2]] == 0).all()
    (grad,) = torch.autograd.grad(back, values, torch.arange(5.0).double())
    assert grad.tolist() == [1, 3, 4, 0]
    assert valid_rows(targets, -100, ChunkOptions()) is None
    assert valid_rows(targets[:0], -100, ChunkOptions(skip_ignored=True)) is None
    assert gather(x, None) is x and gather_targets(targets, None, -100) is targets
    assert scatter(x, None, targets, -100).shape == x.shape
    both = scatter(torch.stack((values, -values), -1), taken, targets, -100)
    assert torch.equal(both[:, 0], back) and torch.equal(both[:, 1], -back)


def test_an_ignored_row_may_hold_anything() -> None:
    """No row left out is used as padding, for any max_valid."""
    made = inputs(bias=False)
    made["hidden"][-1], made["targets"][-1] = float("nan"), -100
    valid = int((made["targets"] != -100).sum())
    grads = []
    for max_valid in (None, valid, valid + 1):
        leaves = {k: made[k].detach().clone().requires_grad_() for k in ("hidden", "weight")}
        out = linear_cross_entropy(
            **leaves, targets=made["targets"], skip_ignored=True, max_valid=max_valid
        )
        out.loss.backward()
        grads.append(leaves["weight"].grad)
    assert grads[0].isfinite().all()
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def test_refusals() -> None:
    made = inputs()
    for op in (linear_cross_entropy, linear_log_probs):
        with pytest.raises(ValueError, match="max_valid=3 bounds the rows taken under skip"):
            op(**made, max_valid=3)
        for wrong in (-1, 2.5, torch.tensor(3)):
            with pytest.raises(ValueError, match="expected an integer of 0 or more"):
                op(**made, skip_ignored=True, max_valid=wrong)


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("compiled_place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize(("reduction", "max_valid"), [("none", 18), ("mean", 16)])
def test_compiled_equals_eager(compiled_place, reduction, max_valid) -> None:
    place = compiled_place
    torch._dynamo.reset()
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    options = {"reduction": reduction, "chunk_size": 9, "max_valid": max_valid}
    results = []
    for function in (skipping, torch.compile(skipping, fullgraph=True, backend=backend)):
        made = on(place, inputs())
        loss, z_loss = function(**made, **options)
        loss.backward(random(*loss.shape, seed=5).to(loss))
        results.append((loss, z_loss, *(made[k].grad for k in LEAVES)))
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
def test_counting_is_refused_under_compile(monkeypatch) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(skipping, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="pass max_valid"):
        compiled(**inputs())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"counts the targets on the host.*pass max_valid"):
        skipping(**inputs())
