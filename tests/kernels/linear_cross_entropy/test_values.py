"""Loss, what is asked of each token, and gradients of a head, against softmax in float64.

`test_grid.py` tests sizes, layouts and autocast.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from ligermodels.kernels import linear_cross_entropy, linear_log_probs
from tests.kernels import formulas
from tests.kernels.checks import compare
from tests.kernels.conftest import BFLOAT16, FLOAT32, INTERPRETING, PLACES, places
from tests.kernels.linear_cross_entropy.head import (
    BLOCKS,
    CONSTANT,
    CUTS,
    VOCAB,
    WIDTH,
    cut_inputs,
    head_loss,
    inputs,
    least_budget,
    on,
    spy_on_the_plan,
)
from tests.kernels.ops_table import LOSS_OPTIONS, outputs_and_gradients
from tests.kernels.test_cross_entropy import ASKED, names_without_ties
from tests.pairwise import pairwise

FROZEN: list[tuple[str, ...]] = [(), ("hidden",), ("weight", "bias")]
if not INTERPRETING:  # The gradients of the inputs are made outside the kernels.
    FROZEN += [("weight",), ("bias",), ("hidden", "weight"), ("hidden", "bias")]
SKIPPED = [
    {},
    {"skip_ignored": True},
    # More than the targets that count, so the rows that are taken include padding.
    {"skip_ignored": True, "max_valid": 18},
    {"skip_ignored": True, "max_valid": 2**70},
]
LOGITS = {
    "ignore_index": [-100, 3],
    "softcap": [None, 3.0],
    "logit_scale": [1.0, 1.7],
    "temperature": [1.0, 0.6],
    "bias": [False, True],
}
LOSS = LOGITS | {
    "label_smoothing": [0.0, 0.2, 1.0],
    "z_loss": [0.0, 0.02],
    "class_weights": [None, True],
    "token_weights": [None, True],
}
NORMALIZERS = [None, 5.0, torch.tensor(2.5)]


def drawn(draw: Random, options: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a value of each option, drawn at random, and which ignored rows are skipped."""
    return {name: draw.choice(values) for name, values in options.items()} | draw.choice(SKIPPED)


@pairwise(
    indirect=["place"],
    place=PLACES,
    # Which loops run depends on the cut, the reduction and the frozen inputs.
    way=[(cut, reduction) for cut in CUTS for reduction in ("mean", "none")] + [("chunks", "sum")],
    frozen=FROZEN,
)
def test_loss(place, monkeypatch, way, frozen) -> None:
    """Compare for random options and upstream gradients of the loss and of what is asked."""
    cut, reduction = way
    plans = spy_on_the_plan(monkeypatch)
    draw = Random(f"{place} {way} {frozen}")
    for _ in range(1 if INTERPRETING else 3):
        options = drawn(draw, LOSS) | ASKED[draw.choice(names_without_ties(place))]
        if reduction == "mean":
            options["normalizer"] = draw.choice(NORMALIZERS)
        made = cut_inputs(cut, place, head_loss, frozen, reduction=reduction, **options)
        plans.clear()
        compare(
            head_loss, formulas.linear_cross_entropy, made, place, frozen=frozen, constant=CONSTANT
        )
        assert (plans[0].vocab_block is not None) == (cut in BLOCKS and "weight" not in frozen)


@pairwise(indirect=["place"], place=PLACES, cut=CUTS, entropy=[False, True], used=[None, 0, -1])
def test_log_probs(place, cut, entropy, used) -> None:
    """Compare both outputs, and each alone."""
    draw = Random(f"{place} {cut} {entropy} {used}")
    for _ in range(1 if INTERPRETING else 3):
        options = drawn(draw, LOGITS) | {"entropy": entropy}
        made = cut_inputs(cut, place, linear_log_probs, **options)
        compare(linear_log_probs, formulas.linear_log_probs, made, place, used=used)


@pairwise(
    indirect=["place"],
    place=PLACES,
    cut=CUTS,
    reduction=["none", "sum", "mean"],
    skipped=SKIPPED[:3],
)
def test_all_ignored(place, cut, reduction, skipped) -> None:
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "return_token_stats": True, **skipped}
    made = on(place, cut_inputs(cut, place, head_loss, reduction=reduction, **options))
    made["targets"] = torch.full_like(made["targets"], -100)
    for x in outputs_and_gradients(head_loss, made):
        assert torch.equal(x, torch.zeros_like(x))


def test_ignored_rows_are_never_read(float32_place) -> None:
    """Statistics of ignored tokens are 0, and no row left out is used as padding."""
    made = on(float32_place, inputs((4, 6)))
    ignored = made["targets"] == -100
    expected = outputs_and_gradients(head_loss, made | {"return_token_stats": True})
    made["hidden"].data[ignored] = float("nan")
    valid = int((~ignored).sum())
    for max_valid in (None, valid, valid + 1):
        options = {"skip_ignored": True, "max_valid": max_valid, "return_token_stats": True}
        found = outputs_and_gradients(head_loss, made | options)
        for ours, want in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)
    out = linear_cross_entropy(**made, return_token_stats=True)
    for x in (out.token_loss, out.log_probs, out.entropy, out.correct):
        assert x.shape == ignored.shape and not x.requires_grad and not x[ignored].any()


def test_classes_out_of_range(float32_place) -> None:
    """They are an error on a CPU. On a GPU they make their rows NaN, and nothing else."""
    for name, row in (("targets", (4,)), ("alternatives", (4, 1))):
        for wrong in (VOCAB, 2**40, *([-1, -(2**40)] if name == "targets" else [])):
            made = on(float32_place, inputs(alternatives=True))
            made[name][row] = wrong
            if float32_place.device == "cpu":
                with pytest.raises(IndexError, match=rf"{name[:-1]} {wrong} .*outside the vocab"):
                    linear_cross_entropy(**made)
                continue
            out = linear_cross_entropy(**made)
            found = out.alternative_log_probs if name == "alternatives" else out.token_loss
            assert found[row].isnan() and found.isnan().sum() == 1, wrong
            assert out.loss.isnan() == (name == "targets")


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("compiled_place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize("cut", ["budget", pytest.param("chunks", marks=pytest.mark.long)])
def test_compiled_equals_eager(compiled_place, cut) -> None:
    """The trace holds every piece, of which a small budget makes many; few rows keep it short."""
    if cut == "budget":
        source = inputs((3,), vocab=16, **LOSS_OPTIONS)
        source["max_scratch_bytes"] = least_budget(on(compiled_place, source), head_loss) + 200
    else:
        options = LOSS_OPTIONS | ASKED["all"] | {"reduction": "none", "top_k": 0}
        source = inputs(skip_ignored=True, max_valid=18, chunk_size=12, **options)
    backend = "inductor" if compiled_place.device == "cuda" else "aot_eager"
    tolerance = 2e-2 if compiled_place.dtype == torch.bfloat16 else 1e-5
    torch._dynamo.reset()
    made = on(compiled_place, source)
    compiled = torch.compile(head_loss, fullgraph=True, backend=backend)
    expected = outputs_and_gradients(head_loss, made)
    for ours, eager in zip(outputs_and_gradients(compiled, made), expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize(
    ("trained", "chunk_size", "lengths"),
    [
        pytest.param(False, None, range(WIDTH - 6, WIDTH + 6), marks=pytest.mark.long),
        (True, None, range(WIDTH - 6, WIDTH + 6)),
        (True, 8, range(9, 17)),  # of two chunks
    ],
)
def test_one_graph_for_any_number_of_tokens(trained, chunk_size, lengths) -> None:
    """Batches of different lengths share one compiled graph for each number of chunks.

    The first length may have a graph of its own, and so may few rows if the head is trained.
    """
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(head_loss, fullgraph=True, backend=backend)
    for rows in lengths:
        made = inputs((rows,), chunk_size=chunk_size)
        made["weight"].requires_grad_(trained)
        assert torch.equal(function(**made).loss, head_loss(**made).loss)
    assert len(graphs) <= 2 + (trained and chunk_size is None)
