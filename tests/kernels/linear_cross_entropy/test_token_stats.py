"""Token statistics beside the loss: log-probability, entropy, and whether argmax is the target."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import cross_entropy, linear_cross_entropy
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.loss_options import (
    TOKEN_STATS,
    CrossEntropyOptions,
    TokenStats,
    token_request,
)
from tests.kernels import formulas, test_cross_entropy
from tests.kernels.checks import compare, random
from tests.kernels.conftest import BFLOAT16, FLOAT32, INTERPRETING, PLACES, places
from tests.kernels.linear_cross_entropy import test_functions as test_linear_cross_entropy
from tests.kernels.linear_cross_entropy.test_functions import on
from tests.kernels.test_cross_entropy import (
    CONSTANT,
    OPTIONS,
    OUT_OF_RANGE,
    ROWS,
    VOCAB,
    targets_for,
)
from tests.pairwise import pairwise


def stats(**kwargs) -> tuple[torch.Tensor, ...]:
    """Return loss, z-loss, log-probabilities and entropy, which have a formula in float64."""
    out = cross_entropy(**kwargs, return_token_stats=True)
    return out.loss, out.z_loss, out.log_probs, out.entropy


def stats_formula(**kwargs) -> tuple[torch.Tensor, ...]:
    options = {k: v for k, v in kwargs.items() if k != "reduction"}
    loss, z = formulas.cross_entropy(**kwargs)
    log_probs, entropy, _ = formulas.token_stats(**options)
    if kwargs.get("reduction") != "none":
        log_probs, entropy = log_probs.detach(), entropy.detach()
    return loss, z, log_probs, entropy


def linear_stats(**kwargs) -> tuple[torch.Tensor, ...]:
    out = linear_cross_entropy(**kwargs, return_token_stats=True)
    return out.loss, out.z_loss, out.log_probs, out.entropy


def linear_formula(hidden, weight, targets, bias=None, chunk_size=None, **options):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return stats_formula(logits=logits, targets=targets, **options)


@pairwise(indirect=["place"], place=PLACES, name=OPTIONS, reduction=["none", "mean"])
def test_of_logits(place, name, reduction) -> None:
    """Compare values; with "none" also the summed gradients of loss, log-probability, entropy."""
    made = test_cross_entropy.inputs((ROWS,), VOCAB, name) | {"reduction": reduction}
    compare(stats, stats_formula, made, place, constant=CONSTANT)


@pairwise(
    indirect=["place"], place=PLACES, name=OPTIONS, reduction=["none", "sum"], chunk_size=[None, 9]
)
def test_of_a_head(place, name, reduction, chunk_size) -> None:
    made = test_linear_cross_entropy.inputs(name=name)
    made |= {"reduction": reduction, "chunk_size": chunk_size}
    compare(linear_stats, linear_formula, made, place, constant=CONSTANT)


@pytest.mark.parametrize("vocab", [1, 1023, 1025, 5000])
def test_vocabularies_at_the_edges_of_a_block(float32_place, vocab) -> None:
    place = float32_place
    made = test_cross_entropy.inputs((5,), vocab, "softcap") | {"reduction": "none"}
    compare(stats, stats_formula, made, place, constant=CONSTANT)
    made = on(place, made)
    correct = cross_entropy(**made, return_token_stats=True).correct
    assert torch.equal(correct, formulas.token_stats(**made)[2])


def test_the_other_outputs_stay_the_same(compiled_place) -> None:
    made = on(compiled_place, test_linear_cross_entropy.inputs((2, 9), name="z-loss"))
    plain = linear_cross_entropy(**made)
    assert all(x is None for x in plain[3:])
    asked = linear_cross_entropy(**made, return_token_stats=True)
    for a, b in zip(plain[:3], asked):
        assert torch.equal(a, b)
    for x in asked[2:6]:
        assert x.shape == (2, 9) and not x.requires_grad
    assert asked.correct.dtype == torch.bool
    asked.loss.backward()
    wanted = torch.autograd.grad(plain.loss, made["hidden"])[0]
    assert torch.equal(made["hidden"].grad, wanted)


def test_statistics_of_ignored_tokens_are_zero(float32_place) -> None:
    made = on(float32_place, test_linear_cross_entropy.inputs())
    made["targets"][3:] = -100
    made["hidden"].data[5] = float("nan")  # a row that targets[3:] ignores
    out = linear_cross_entropy(**made, return_token_stats=True)
    ignored = made["targets"] == -100
    assert ignored.sum() > 10
    for x in out[2:6]:
        assert (x[ignored] == 0).all()
    assert (out.log_probs[~ignored] < 0).all() and (out.entropy[~ignored] > 0).all()


def test_correct_is_whether_argmax_is_the_target(place) -> None:
    """If bfloat16 logits tie, the lowest class counts, as in argmax on the CPU."""
    rows, vocab = 50, 40
    logits = (random(rows, vocab, seed=4) * 2).round().to(place.device, place.dtype)
    ties = (logits == logits.amax(-1, keepdim=True)).sum(-1)
    assert (ties > 1).sum() > 5
    best = logits.cpu().argmax(-1)
    second = logits.cpu().flip(-1).argmax(-1)
    second = vocab - 1 - second  # the last class that has the largest logit
    for targets, want in (
        (best, torch.ones(rows, dtype=torch.bool)),
        (second, best == second),
        (targets_for((rows,), vocab), None),
    ):
        out = cross_entropy(logits, targets.to(place.device), return_token_stats=True)
        want = (best == targets) if want is None else want
        assert torch.equal(out.correct.cpu(), want)


def test_correct_under_a_softcap_that_rounds_logits_alike(place) -> None:
    logits = torch.tensor([[500.0, 600.0, 400.0]], device=place.device, dtype=place.dtype)
    for target, want in ((0, False), (1, True), (2, False)):
        targets = torch.tensor([target], device=place.device)
        out = cross_entropy(logits, targets, softcap=2.0, return_token_stats=True)
        assert out.correct.item() is want


def test_extreme_logits(place) -> None:
    """Statistics are finite if probabilities underflow or logits are huge or -infinity."""
    inf = float("inf")
    rows = [[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [-inf, 1.0, 1.0], [3e4, 3e4, -inf]]
    logits = torch.tensor(rows, dtype=place.dtype, device=place.device, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 0], device=place.device)
    out = cross_entropy(logits, targets, reduction="none", return_token_stats=True)
    log2, log3 = torch.tensor([2.0, 3.0]).log().tolist()
    expected = torch.tensor([0.0, log3, log2, log2], dtype=out.loss.dtype, device=place.device)
    tolerance = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out.log_probs, -expected, **(tolerance | {"atol": 3e-3}))
    torch.testing.assert_close(out.entropy, expected, **tolerance)
    (out.log_probs.sum() + 3 * out.entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[2, 0] == 0 and logits.grad[3, 2] == 0


def test_rows_with_a_target_out_of_range_are_nan(float32_place) -> None:
    logits = random(3, 5, seed=2).float().to(float32_place.device)
    for target in OUT_OF_RANGE:
        targets = torch.tensor([1, target, -100], device=float32_place.device)
        made = TokenStats.empty(3, logits, token_request(TOKEN_STATS, 0))
        select("cross_entropy", logits).cross_entropy_rows(
            logits, targets, None, None, None, CrossEntropyOptions(), False, stats=made
        )
        for x in (made.log_probs, made.entropy, made.sum_sq_probs, made.mean_logits):
            assert x[1].isnan() and x[0].isfinite() and x[2] == 0, target
        assert not made.correct[1] and not made.correct[2], target


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("compiled_place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiled_equals_eager(compiled_place, reduction) -> None:
    place = compiled_place
    torch._dynamo.reset()
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    results = []
    for function in (
        linear_stats,
        torch.compile(linear_stats, fullgraph=True, backend=backend),
    ):
        made = on(place, test_linear_cross_entropy.inputs(name="softcap"))
        outputs = function(**made, reduction=reduction, chunk_size=12)
        pairs = [(x, random(*x.shape, seed=6).to(x)) for x in outputs if x.requires_grad]
        torch.autograd.backward(*zip(*pairs))
        results.append((*outputs, *(made[k].grad for k in ("hidden", "weight", "bias"))))
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance / 10)
