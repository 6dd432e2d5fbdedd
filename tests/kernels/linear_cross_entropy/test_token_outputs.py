"""What can be asked of each token by name: against softmax in float64, for any upstream gradient.

`test_token_stats.py` tests the three statistics that `return_token_stats=True` returns.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import cross_entropy, linear_cross_entropy
from ligermodels.kernels.loss_options import TOKEN_STATS
from tests.kernels import formulas, test_cross_entropy
from tests.kernels.checks import compare, random
from tests.kernels.conftest import FLOAT32, INTERPRETING, PLACES, places
from tests.kernels.linear_cross_entropy import test_functions
from tests.kernels.linear_cross_entropy.test_functions import (
    FEW,
    ROWS,
    VOCAB,
    WIDTH,
    on,
    small_budget,
)
from tests.kernels.test_cross_entropy import CONSTANT
from tests.pairwise import pairwise

PICKED = ("alternative_log_probs", "top_ids", "top_log_probs")
FLOATS = ("log_probs", "entropy", "sum_sq_probs", "mean_logits", *PICKED[::2])
ASKED = {
    "squares": {"return_token_stats": ("sum_sq_probs",)},
    "mean": {"return_token_stats": ("mean_logits",)},
    "alternatives": {"alternatives": True},
    "the likeliest": {"top_k": 3},
    "everything": {
        "return_token_stats": TOKEN_STATS,
        "alternatives": True,
        "top_k": 2,
        "temperature": 0.7,
    },
}


def alternatives(rows: int = ROWS, vocab: int = VOCAB) -> torch.Tensor:
    """Return four classes of each row: some are equal, some are the target, some are padding."""
    first = torch.arange(rows) * 5 % vocab
    third = test_cross_entropy.targets_for((rows,), vocab, -100)
    return torch.stack((first, (first + torch.arange(rows) % 2) % vocab, third, first * 0), -1)


def asked(name: str, made: dict, **shape: int) -> dict:
    """Return the inputs with a request."""
    request = dict(ASKED[name])
    if "alternatives" in request:
        request["alternatives"] = alternatives(**shape)
    return made | request


def floats(out) -> tuple[torch.Tensor, ...]:
    """Return the loss and all differentiable outputs of tokens that were asked for."""
    return out.loss, *(x for name in FLOATS if (x := getattr(out, name)) is not None)


def ours(**kwargs) -> tuple[torch.Tensor, ...]:
    return floats(linear_cross_entropy(**kwargs, reduction="none"))


def of_logits(**kwargs) -> tuple[torch.Tensor, ...]:
    return floats(cross_entropy(**kwargs, reduction="none"))


def logits_formula(
    logits,
    targets,
    return_token_stats=(),
    alternatives=None,
    top_k=0,
    temperature=1.0,
    ignore_index=-100,
    softcap=None,
    logit_scale=1.0,
    **options,
):
    t = formulas.widened(logits) * logit_scale
    t = (t if softcap is None else softcap * torch.tanh(t / softcap)) / temperature
    log_p = torch.log_softmax(t, -1)
    valid = targets != ignore_index
    log_probs, entropy, _ = formulas.token_stats(t, targets, ignore_index=ignore_index)
    made = {
        "log_probs": log_probs,
        "entropy": entropy,
        "sum_sq_probs": log_p.exp().square().sum(-1) * valid,
        "mean_logits": t.mean(-1) * valid,
    }
    loss, _ = formulas.cross_entropy(
        t, targets, reduction="none", ignore_index=ignore_index, **options
    )
    outputs = [loss, *(made[name] for name in FLOATS if name in return_token_stats)]
    if alternatives is not None:
        kept = (alternatives >= 0) & valid[..., None]
        outputs.append(log_p.gather(-1, torch.where(kept, alternatives, 0)) * kept)
    if top_k:
        outputs.append(log_p.topk(top_k).values * valid[..., None])
    return tuple(outputs)


def formula(hidden, weight, bias=None, chunk_size=None, max_scratch_bytes=None, **options):
    return logits_formula(F.linear(hidden, weight, bias), **options)


@pairwise(indirect=["place"], place=PLACES, name=["plain", "softcap", "everything"], request_=ASKED)
def test_of_logits(place, name, request_) -> None:
    if place.dtype == torch.bfloat16 and "top_k" in ASKED[request_]:
        return  # classes of equal logits have any order
    made = asked(request_, test_cross_entropy.inputs((ROWS,), VOCAB, name))
    compare(of_logits, logits_formula, made, place, constant=CONSTANT)


@pairwise(
    indirect=["place"],
    place=PLACES,
    name=["plain", "smoothing", "softcap", "everything"],
    request_=ASKED,
    chunk_size=[None, 9],
)
def test_of_a_head(place, name, request_, chunk_size) -> None:
    if place.dtype == torch.bfloat16 and "top_k" in ASKED[request_]:
        return
    made = asked(request_, test_functions.inputs(name=name)) | {"chunk_size": chunk_size}
    compare(ours, formula, made, place, constant=CONSTANT)


@pytest.mark.parametrize("extra", [0, 12])
def test_budgets_without_an_accumulator(float32_place, extra) -> None:
    shape, width, vocab = ((WIDTH + 2,), WIDTH, VOCAB) if extra else FEW
    made = test_functions.inputs(shape, width, vocab, name="softcap")
    made = asked("everything", made, rows=shape[0], vocab=vocab)
    budget = small_budget(made, float32_place, extra, linear_cross_entropy, reduction="none")
    compare(ours, formula, made | {"max_scratch_bytes": budget}, float32_place)


@pytest.mark.parametrize("vocab", [1, 1025])
def test_vocabularies_at_the_edges_of_a_block(float32_place, vocab) -> None:
    made = test_cross_entropy.inputs((5,), vocab)
    made |= {"return_token_stats": TOKEN_STATS, "alternatives": alternatives(5, vocab), "top_k": 1}
    compare(of_logits, logits_formula, made, float32_place)


def test_the_likeliest_classes(place) -> None:
    made = on(place, test_functions.inputs((2, 9), name="softcap", bias=False))
    out = linear_cross_entropy(**made, top_k=4, chunk_size=5)
    logits = made["hidden"] @ made["weight"].t()
    assert out.top_ids.shape == out.top_log_probs.shape == (2, 9, 4)
    assert out.alternative_log_probs is None
    torch.testing.assert_close(logits.gather(-1, out.top_ids), logits.topk(4).values)
    assert not out.top_log_probs.requires_grad
    assert (out.top_log_probs.diff(dim=-1) <= 0).all()


def test_a_temperature_is_a_scale_of_the_capped_logits(place) -> None:
    made = on(place, test_functions.inputs(name="everything"))
    del made["softcap"]
    for temperature in (0.5, 2.0):
        hot = linear_cross_entropy(**made, temperature=temperature)
        made["logit_scale"] = made.get("logit_scale", 1.0) / temperature
        scaled = linear_cross_entropy(**made)
        assert torch.equal(hot.loss, scaled.loss)
        made["logit_scale"] *= temperature


@pytest.mark.skipif(INTERPRETING, reason="other tests run the same kernels in the interpreter")
@pytest.mark.parametrize("budget", ["skip_ignored", "no gradients in forward", "vocabulary"])
def test_token_weights_in_every_strategy(float32_place, budget) -> None:
    made = on(float32_place, test_functions.inputs((40,), bias=False))
    weights = random(40, seed=9).float().to(float32_place.device)
    wanted = (linear_cross_entropy(**made, reduction="none").loss * weights).sum() / 7
    wanted_grads = torch.autograd.grad(wanted, [made["hidden"], made["weight"]])
    options = {
        "skip_ignored": {"skip_ignored": True, "max_valid": 30},
        "no gradients in forward": {"max_scratch_bytes": 40 * 64 + 4400},
        "vocabulary": {"max_scratch_bytes": 40 * 64 + 8500},
    }[budget]
    out = linear_cross_entropy(**made, **options, token_weights=weights, normalizer=7)
    grads = torch.autograd.grad(out.loss, [made["hidden"], made["weight"]])
    torch.testing.assert_close((out.loss, *grads), (wanted, *wanted_grads), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
@pytest.mark.parametrize("chunk_size", [None, 9])
def test_token_weights_need_no_fourth_product(float32_place, chunk_size) -> None:
    made = on(float32_place, test_functions.inputs(bias=False))
    weights = torch.ones(ROWS, device=float32_place.device)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(**made, token_weights=weights, chunk_size=chunk_size).loss.backward()
    assert counter.get_total_flops() == 3 * 2 * ROWS * WIDTH * VOCAB


@pytest.mark.skipif(INTERPRETING, reason="other tests run the same kernels in the interpreter")
def test_skipping_ignored_targets(float32_place) -> None:
    made = on(float32_place, asked("everything", test_functions.inputs(name="softcap")))
    plain = ours(**made)
    upstream = [random(*x.shape, seed=i).to(x) for i, x in enumerate(plain)]
    leaves = [made["hidden"], made["weight"]]
    wanted = torch.autograd.grad(plain, leaves, upstream)
    for max_valid in (None, ROWS - 2):
        skipped = ours(**made, skip_ignored=True, max_valid=max_valid)
        torch.testing.assert_close(skipped, plain, rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(skipped, leaves, upstream)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)


def test_a_class_out_of_range_gives_nan_on_a_gpu_and_an_error_on_a_cpu(float32_place) -> None:
    made = on(float32_place, test_functions.inputs(bias=False))
    for wrong in (VOCAB, 2**40):
        made["alternatives"] = torch.zeros(ROWS, 2, dtype=torch.int64, device=float32_place.device)
        made["alternatives"][4, 1] = wrong
        if float32_place.device == "cpu":
            with pytest.raises(IndexError, match=f"alternative {wrong} is outside the vocab"):
                linear_cross_entropy(**made)
        else:
            found = linear_cross_entropy(**made).alternative_log_probs.isnan()
            assert found[4, 1] and found.sum() == 1


def test_refusals() -> None:
    made = test_functions.inputs(bias=False)
    for given, complaint in (
        ({"top_k": VOCAB + 1}, r"top_k=52; expected at most the vocabulary, 51"),
        ({"alternatives": torch.zeros(ROWS, dtype=torch.int64)}, r"alternatives \(23,\) do not"),
        ({"alternatives": torch.zeros(ROWS, 2)}, r"alternatives are torch.float32"),
    ):
        with pytest.raises(ValueError, match=rf"^cross entropy: {complaint}"):
            linear_cross_entropy(**made, **given)
    with pytest.raises(ValueError, match=r"^loss head: token_weights \(3,\) on cpu do not fit"):
        linear_cross_entropy(**made, token_weights=torch.ones(3))


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("compiled_place", places(FLOAT32, gpu=(FLOAT32,)), indirect=True)
def test_compiled_equals_eager(compiled_place) -> None:
    place = compiled_place
    torch._dynamo.reset()
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    results = []
    for function in (ours, torch.compile(ours, fullgraph=True, backend=backend)):
        made = on(place, asked("everything", test_functions.inputs(name="softcap")))
        outputs = function(**made, chunk_size=12)
        torch.autograd.backward(outputs, [random(*x.shape, seed=6).to(x) for x in outputs])
        results.append((*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
