"""The contract of the loss head, at the level of the op.

`test_grid.py` tests sizes, layouts, autocast and the frozen inputs of a head in several chunks.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels import cross_entropy, linear_cross_entropy
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import BFLOAT16, FLOAT32, INTERPRETING, PLACES, places
from tests.kernels.test_cross_entropy import OUT_OF_RANGE, options_for, targets_for
from tests.pairwise import pairwise

ROWS, WIDTH, VOCAB = 23, 14, 51
WIDE = 40
"""A width larger than ROWS. A single chunk then keeps the gradient of its logits for backward."""

FEW = ((7,), 5, 17)
"""Shape, width and vocabulary for the least budget, under which the pieces are smallest."""

CUTS = {
    "one chunk": (WIDTH, None),
    "several chunks": (WIDTH, 9),
    "fewer rows than columns": (WIDE, None),
}
"""Width and chunk size for each of the ways in which a head without a budget runs."""


# The counter sees a registered op and not the product within it. These formulas are not in the
# package because the counter imports triton.
@register_flop_formula(torch.ops.ligermodels.wide_product)
def _wide_product_flop(a, b, **_) -> int:
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula(torch.ops.ligermodels.accumulate_product)
def _accumulate_product_flop(_, a, b, **__) -> int:
    return 2 * a[0] * a[1] * b[1]


CONSTANT = ("class_weights", "token_weights")


def inputs(
    shape: tuple[int, ...] = (ROWS,),
    width: int = WIDTH,
    vocab: int = VOCAB,
    name: str = "plain",
    bias: bool = True,
) -> dict:
    options = options_for(name, vocab)
    return {
        "hidden": random(*shape, width, seed=1),
        "weight": random(vocab, width, seed=2),
        "targets": targets_for(shape, vocab, options.get("ignore_index", -100)),
        "bias": random(vocab, seed=3) if bias else None,
        **options,
    }


def ours(**kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    return linear_cross_entropy(**kwargs)[:2]


def formula(*, chunk_size=None, max_scratch_bytes=None, **kwargs):
    return formulas.linear_cross_entropy(**kwargs)


def on(place, made: dict) -> dict:
    """Return the inputs on a place's device, the floating point ones as leaves of its dtype."""
    return {
        k: v.to(place.device, place.dtype).requires_grad_()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else (v.to(place.device) if isinstance(v, torch.Tensor) else v)
        for k, v in made.items()
    }


@pairwise(
    lambda reduction, normalizer: reduction == "mean" or normalizer is None,
    indirect=["place"],
    place=PLACES,
    reduction=["mean", "sum", "none"],
    cut=CUTS,
    label_smoothing=[0.0, 0.2, 1.0],
    z_loss=[0.0, 0.02],
    softcap=[None, 3.0],
    logit_scale=[1.0, 1.7],
    temperature=[1.0, 0.6],
    class_weights=[False, True],
    token_weights=[False, True],
    bias=[False, True],
    ignore_index=[-100, 3],
    normalizer=[None, 5.0],
)
def test_every_pair_of_options(
    place,
    reduction,
    cut,
    label_smoothing,
    z_loss,
    softcap,
    logit_scale,
    temperature,
    class_weights,
    token_weights,
    bias,
    ignore_index,
    normalizer,
) -> None:
    """Compare loss, z-loss and gradients, with random upstream gradients."""
    width, chunk_size = CUTS[cut]
    made = inputs(width=width, bias=bias) | {
        "targets": targets_for((ROWS,), VOCAB, ignore_index),
        "reduction": reduction,
        "chunk_size": chunk_size,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "temperature": temperature,
        "class_weights": random(VOCAB, seed=9).abs() + 0.1 if class_weights else None,
        "token_weights": random(ROWS, seed=10) if token_weights else None,
        "ignore_index": ignore_index,
        "normalizer": normalizer,
    }
    compare(ours, formula, made, place, constant=CONSTANT)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_one_hidden_column(float32_place, reduction) -> None:
    made = inputs((5,), 1, 1) | {"reduction": reduction, "chunk_size": 2}
    compare(ours, formula, made, float32_place)


@pytest.mark.parametrize("normalizer", [3, torch.tensor(2.5)], ids=str)
def test_normalizer(float32_place, normalizer) -> None:
    value = float(normalizer)
    if isinstance(normalizer, torch.Tensor):
        normalizer = normalizer.to(float32_place.device)
    compare(
        lambda **kwargs: ours(**kwargs, normalizer=normalizer),
        lambda **kwargs: formula(**kwargs, normalizer=value),
        inputs(),
        float32_place,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulation_steps_with_one_normalizer(compiled_place, weighted) -> None:
    """The losses of two halves add up to that of the whole, if all use the whole's normalizer."""
    made = on(compiled_place, inputs(name="weights" if weighted else "plain"))
    weights = made.pop("class_weights", None)
    weights = None if weights is None else weights.detach().float()
    hidden, weight, targets, bias = (made[k] for k in ("hidden", "weight", "targets", "bias"))
    valid = targets != -100
    total = valid.sum() if weights is None else weights[targets[valid]].sum()
    whole, *_ = linear_cross_entropy(hidden, weight, targets, bias, class_weights=weights)
    expected = torch.autograd.grad(whole, (hidden, weight, bias))
    halves = [
        linear_cross_entropy(
            hidden[part], weight, targets[part], bias, class_weights=weights, normalizer=total
        )[0]
        for part in (slice(0, 3), slice(3, None))
    ]
    got = torch.autograd.grad(sum(halves), (hidden, weight, bias))
    tolerance = 2e-2 if compiled_place.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(sum(halves), whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10)


def test_no_grad(float32_place) -> None:
    made = on(float32_place, inputs())
    expected = linear_cross_entropy(**made)
    with torch.no_grad():
        loss = linear_cross_entropy(**made)
    for a, b in zip(loss[:3], expected):
        assert not a.requires_grad
        torch.testing.assert_close(a, b.detach())


def test_third_output_is_the_loss_of_each_token(float32_place) -> None:
    made = on(float32_place, inputs((2, 4)))
    _, _, token_loss, *_ = linear_cross_entropy(**made)
    expected, _, same, *_ = linear_cross_entropy(**made, reduction="none")
    assert same is expected
    assert token_loss.shape == (2, 4) and not token_loss.requires_grad
    torch.testing.assert_close(token_loss, expected.detach())
    assert (token_loss[made["targets"] == -100] == 0).all()


@pairwise(indirect=["place"], place=PLACES, reduction=["none", "sum", "mean"], chunk_size=[None, 2])
def test_all_ignored(place, reduction, chunk_size) -> None:
    made = on(place, inputs())
    made["targets"] = torch.full_like(made["targets"], -100)
    loss, z_loss, *_ = linear_cross_entropy(
        **made, reduction=reduction, chunk_size=chunk_size, z_loss=0.1, label_smoothing=0.1
    )
    loss.sum().backward()
    for x in (loss, z_loss, *(made[k].grad for k in ("hidden", "weight", "bias"))):
        assert torch.equal(x, torch.zeros_like(x))


def test_any_chunk_size_gives_the_same(compiled_place) -> None:
    whole = on(compiled_place, inputs(name="z-loss"))
    expected, _, expected_tokens, *_ = linear_cross_entropy(**whole)
    expected.backward()
    tolerance = 1e-2 if compiled_place.dtype == torch.bfloat16 else 1e-5
    for chunk_size in (1, 5, 12, 23, 100):
        parts = on(compiled_place, inputs(name="z-loss"))
        loss, _, tokens, *_ = linear_cross_entropy(**parts, chunk_size=chunk_size)
        loss.backward()
        pairs = [(loss, expected, 1.0), (tokens, expected_tokens, 1.0)]
        pairs += [(parts[k].grad, whole[k].grad, 0.1) for k in ("hidden", "weight", "bias")]
        for got, wanted, factor in pairs:
            bounds = {"rtol": tolerance, "atol": tolerance * factor}
            torch.testing.assert_close(
                got, wanted, **bounds, msg=lambda text, n=chunk_size: f"chunk_size={n}: {text}"
            )


def test_target_out_of_range_is_an_error_on_the_cpu() -> None:
    for target in (*OUT_OF_RANGE[2:], -1, VOCAB):
        made = inputs(bias=False)
        made["targets"][4] = target
        with pytest.raises(IndexError, match=rf"target {target} at flat position 4"):
            linear_cross_entropy(**made)


@pytest.mark.gpu
def test_target_out_of_range_is_nan_on_a_gpu() -> None:
    for target in (*OUT_OF_RANGE[2:], -1, VOCAB):
        made = {k: v.cuda() for k, v in inputs().items()}
        made["targets"][4] = target
        loss, _, tokens, *_ = linear_cross_entropy(**made)
        assert loss.isnan() and tokens[4].isnan() and tokens.isnan().sum() == 1, target


def small_budget(made: dict, place, rows: int = 12, op=linear_cross_entropy, **options) -> int:
    """Return a budget that holds this many rows of logits more than the least budget.

    It holds neither all logits nor an accumulator of the weight gradient.
    """
    with pytest.raises(ValueError, match="at least") as error:
        op(**on(place, made), **options, max_scratch_bytes=1)
    least = int(str(error.value).split()[-1])
    return least + rows * VOCAB * place.dtype.itemsize


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("compiled_place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize(
    ("name", "reduction", "cut"),
    [
        ("plain", "mean", "few rows"),
        ("everything", "none", "few rows"),
        ("plain", "none", "rows"),
        ("everything", "sum", "rows"),
        ("everything", "mean", "columns"),
    ],
)
def test_compiled_equals_eager(compiled_place, name, reduction, cut) -> None:
    """torch.compile(fullgraph=True) gives what eager gives, also with ignored targets."""
    place = compiled_place
    torch._dynamo.reset()
    options = {"reduction": reduction}
    # The trace holds every piece, and a small budget makes many of them. Few rows keep it short.
    shape = (3,) if cut == "columns" else (ROWS,)
    made = inputs(shape, WIDE if cut == "few rows" else WIDTH, 16, name=name)
    if cut == "rows":
        options["chunk_size"] = 12
    elif cut == "columns":
        options["max_scratch_bytes"] = small_budget(made, place, 3, **options)
    results = []
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    for function in (ours, torch.compile(ours, fullgraph=True, backend=backend)):
        leaves = on(place, made)
        if "class_weights" in leaves:
            leaves["class_weights"] = leaves["class_weights"].detach()
        loss, z_loss = function(**leaves, **options)
        upstream = random(*loss.shape, seed=5).to(loss)
        loss.backward(upstream)
        results.append((loss, z_loss, *(leaves[k].grad for k in ("hidden", "weight", "bias"))))
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    for compiled, eager in zip(*reversed(results)):
        torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_graph_for_any_number_of_tokens(reduction, trained) -> None:
    """Batches of different lengths share one compiled graph, if the head runs in one chunk.

    With a reduction to one number and a trained head, few rows have a graph of their own.
    """
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(ours, fullgraph=True, backend=backend)
    for rows in range(WIDTH - 6, WIDTH + 6):
        made = inputs((rows,)) | {"reduction": reduction}
        made["weight"].requires_grad_(trained)
        assert torch.equal(function(**made)[0], ours(**made)[0])
    assert len(graphs) <= (3 if trained and reduction == "mean" else 2)


def test_numpys_integers_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    made = {k: v.float() if v.is_floating_point() else v for k, v in inputs().items()}
    valid = int((made["targets"] != -100).sum())
    expected = linear_cross_entropy(**made, chunk_size=3, skip_ignored=True, max_valid=valid)
    options = {"chunk_size": numpy.int32(3), "max_valid": numpy.int64(valid)}
    result = linear_cross_entropy(**made, skip_ignored=True, **options)
    assert torch.equal(result.loss, expected.loss)
    for three in (numpy.int64(3), numpy.float32(3)):
        result = linear_cross_entropy(**made, normalizer=three)
        assert torch.equal(result.loss, linear_cross_entropy(**made, normalizer=3).loss)


def test_a_bound_beyond_64_bits_bounds_nothing() -> None:
    made = inputs()
    expected = linear_cross_entropy(**made, skip_ignored=True)
    result = linear_cross_entropy(**made, skip_ignored=True, max_valid=2**70)
    assert torch.equal(result.loss, expected.loss)


def test_refusals() -> None:
    made = inputs(bias=False)
    for wrong in (True, -1, float("inf"), torch.ones(1), torch.tensor(1j)):
        with pytest.raises(ValueError, match=r"normalizer.*; expected a number"):
            linear_cross_entropy(**made, normalizer=wrong)
    for wrong in (2**70, 1.0, True):
        with pytest.raises(ValueError, match=r"ignore_index=.*; expected an integer of 64 bits"):
            linear_cross_entropy(**made, ignore_index=wrong)
    with pytest.raises(ValueError, match=r"class_weights are torch\.complex64"):
        linear_cross_entropy(**made, class_weights=torch.ones(VOCAB, dtype=torch.complex64))
    for bias in (made["weight"][:1, 0], made["weight"][:, 0].float()):
        with pytest.raises(ValueError, match=r"bias .* does not fit weight"):
            linear_cross_entropy(**made | {"bias": bias})
    for wrong in ("1GB", 2e9, True, -1, 0):
        with pytest.raises(ValueError, match=r"max_scratch_bytes=.* expected an integer"):
            linear_cross_entropy(**made, max_scratch_bytes=wrong)
    for wrong in (2.0, True, "3", torch.tensor(3)):
        with pytest.raises(ValueError, match=r"chunk_size=.* expected an integer"):
            linear_cross_entropy(**made, chunk_size=wrong)
    for option in ("logit_scale", "softcap", "z_loss", "label_smoothing"):
        with pytest.raises(ValueError, match=f"{option} is a tensor; expected a number"):
            linear_cross_entropy(**made, **{option: torch.tensor(0.5)})
        with pytest.raises(ValueError, match=option):
            linear_cross_entropy(**made, **{option: float("inf")})
    with pytest.raises(ValueError, match="expected a floating point tensor"):
        linear_cross_entropy(made["hidden"].long(), made["weight"].long(), made["targets"])
    with pytest.raises(ValueError, match="expected the same last dimension"):
        linear_cross_entropy(made["hidden"], made["weight"][:, 1:], made["targets"])
    with pytest.raises(ValueError, match="of 1 or more"):
        linear_cross_entropy(made["hidden"][..., :0], made["weight"][:, :0], made["targets"])
    # A product with a meta tensor would return uninitialised memory.
    with pytest.raises(ValueError, match="weight is on meta and hidden is on cpu"):
        linear_cross_entropy(made["hidden"], made["weight"].to("meta"), made["targets"])
    with pytest.raises(ValueError, match="softcap=True; expected a number"):
        linear_cross_entropy(**made, softcap=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"float64 and weight is torch\.float32; cast one$"):
            linear_cross_entropy(made["hidden"].double(), made["weight"].float(), made["targets"])
    for wrong in ({"weight": made["weight"][0]}, {"hidden": made["hidden"][0, 0]}):
        with pytest.raises(ValueError, match=r"loss head: hidden .* and weight .*; expected \("):
            linear_cross_entropy(**made | wrong)
    with pytest.raises(ValueError, match=r"logits are 0-dimensional"):
        cross_entropy(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(ValueError, match="chunk_size=0"):
        linear_cross_entropy(**made, chunk_size=0)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(made["hidden"], made["weight"], made["targets"][1:])
    with pytest.raises(ValueError, match="reduction='mean'"):
        linear_cross_entropy(**made, reduction="sum", normalizer=3)
    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16 and weight is torch\.float"):
        linear_cross_entropy(**{**made, "hidden": made["hidden"].bfloat16()})
