"""The divergence of a student from a teacher, against KL divergences in float64.

`test_grid.py` tests sizes, layouts, frozen inputs, autocast's gradients and retained graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_cross_entropy, linear_divergence
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import INTERPRETING, PLACES, Place
from tests.kernels.linear_cross_entropy.test_functions import on
from tests.kernels.scratch import peak_scratch
from tests.pairwise import pairwise

ROWS, WIDTH, TEACHER_WIDTH, VOCAB = 11, 14, 9, 51
CONSTANT = ("teacher_hidden", "teacher_weight", "teacher_bias", "token_weights")
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "caps and scales": {
        "softcap": 3.0,
        "logit_scale": 1.3,
        "teacher_softcap": 5.0,
        "teacher_scale": 0.7,
    },
    "temperature": {"temperature": 2.0, "teacher_softcap": 4.0},
}


def inputs(shape: tuple[int, ...] = (ROWS,), vocab: int = VOCAB, name: str = "plain") -> dict:
    return {
        "hidden": random(*shape, WIDTH, seed=1),
        "weight": random(vocab, WIDTH, seed=2, scale=0.5),
        "bias": random(vocab, seed=3),
        "teacher_hidden": random(*shape, TEACHER_WIDTH, seed=4),
        "teacher_weight": random(vocab, TEACHER_WIDTH, seed=5, scale=0.5),
        "teacher_bias": random(vocab, seed=6),
        **OPTIONS[name],
    }


def formula(chunk_size=None, max_scratch_bytes=None, **kwargs) -> torch.Tensor:
    return formulas.linear_divergence(**kwargs)


@pairwise(
    indirect=["place"],
    place=PLACES,
    name=OPTIONS,
    beta=[0.0, 0.1, 0.5, 1.0, None],
    reduction=["mean", "sum", "none"],
    tokens=["all", "masked", "weighted"],
    chunk_size=[None, 5],
)
def test_options(place, name, beta, reduction, tokens, chunk_size) -> None:
    made = inputs(name=name) | {"beta": beta, "reduction": reduction, "chunk_size": chunk_size}
    if tokens == "masked":
        made["mask"] = torch.arange(ROWS) % 3 > 0
    elif tokens == "weighted":
        made["token_weights"] = random(ROWS, seed=8)
    compare(linear_divergence, formula, made, place, constant=CONSTANT)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, None])
@pytest.mark.parametrize("vocab", [1, 1025])
def test_vocabularies_at_the_edges_of_a_block(float32_place, vocab, beta) -> None:
    made = inputs((5,), vocab, "softcap") | {"beta": beta, "reduction": "none"}
    if vocab == 1:
        out = linear_divergence(**on(float32_place, made))
        assert (out.abs() <= 1e-6).all()
    else:
        compare(linear_divergence, formula, made, float32_place, constant=CONSTANT)


def test_the_same_distribution_has_no_divergence(place) -> None:
    made = on(place, inputs())
    for name in ("hidden", "weight", "bias"):
        made[f"teacher_{name}"] = made[name].detach()
    for beta in (0.0, 0.5, 1.0, None):
        loss = linear_divergence(**made, beta=beta)
        grads = torch.autograd.grad(loss, [made["hidden"], made["weight"]])
        assert abs(float(loss)) <= 1e-6
        assert all(grad.abs().max() <= 1e-6 for grad in grads)


def test_classes_that_the_teacher_rules_out(float32_place) -> None:
    """Probabilities of 0 and tiny ones give no NaN, except in the KL that is infinite."""
    made = on(float32_place, inputs())
    made["teacher_bias"] = made["teacher_bias"].detach()
    made["teacher_bias"][3:7] = float("-inf")
    made["teacher_bias"][9] = -200.0
    for beta in (0.0, 0.5, None):
        loss = linear_divergence(**made, beta=beta, reduction="none")
        grads = torch.autograd.grad(loss.sum(), [made["hidden"], made["weight"], made["bias"]])
        assert all(x.isfinite().all() for x in (loss, *grads)), beta
    assert linear_divergence(**made, beta=1.0).isinf()


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
def test_number_of_products(float32_place) -> None:
    made = on(float32_place, inputs())
    own, teachers = 2 * ROWS * WIDTH * VOCAB, 2 * ROWS * TEACHER_WIDTH * VOCAB
    for reduction, chunk_size, wanted in (
        ("mean", None, 3 * own + teachers),
        ("mean", 9, 3 * own + teachers),
        ("none", 9, 4 * own + 2 * teachers),
    ):
        with FlopCounterMode(display=False) as counter:
            linear_divergence(**made, reduction=reduction, chunk_size=chunk_size).sum().backward()
        assert counter.get_total_flops() == wanted


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's tensors are not the kernel's")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_scratch_stays_within_the_budget(place, reduction) -> None:
    made = on(place, inputs((2000,), 300))
    leaves = tuple(made[k] for k in ("hidden", "weight", "bias"))
    teacher = {k: v.detach() for k, v in made.items() if k.startswith("teacher")}
    # PyTorch's sum over 1024 rows for the bias, on a GPU, would take 2 MB for so few classes.
    for budget in (400_000, 1_000_000):

        def forward(budget: int = budget) -> torch.Tensor:
            return linear_divergence(
                *leaves[:2],
                bias=leaves[2],
                **teacher,
                reduction=reduction,
                max_scratch_bytes=budget,
            )

        assert max(peak_scratch(forward, leaves)) <= budget


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's tensors are not the kernel's")
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [512, 8192])  # one chunk, and several of 1 GiB
def test_scratch_is_that_of_linear_cross_entropy(rows) -> None:
    """The width is chosen so that the logits of a chunk take as much as the weight gradient."""
    hidden = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(2**18, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    peaks = (
        max(peak_scratch(forward, (hidden, weight)))
        for forward in (
            lambda: linear_divergence(hidden, weight, hidden.detach(), weight.detach()),
            lambda: linear_cross_entropy(hidden, weight, targets)[0],
        )
    )
    ours, of_targets = peaks
    assert ours <= 1.02 * of_targets


def test_the_teacher_gets_no_gradient(float32_place) -> None:
    made = on(float32_place, inputs())
    linear_divergence(**made).backward()
    assert all(made[f"teacher_{name}"].grad is None for name in ("hidden", "weight", "bias"))
    assert all(made[name].grad is not None for name in ("hidden", "weight", "bias"))
    with torch.no_grad():
        assert not linear_divergence(**made).requires_grad


def test_a_mask_without_tokens(float32_place) -> None:
    made = on(float32_place, inputs())
    mask = torch.zeros(ROWS, dtype=torch.bool, device=float32_place.device)
    loss = linear_divergence(**made, mask=mask)
    loss.backward()
    assert loss == 0 and (made["hidden"].grad == 0).all() and (made["weight"].grad == 0).all()


@pytest.mark.skipif(INTERPRETING, reason="importing TRL takes longer than the interpreter's tests")
def test_against_trl(float32_place) -> None:
    """GKD's loss takes all logits at once and divides by the number of tokens."""
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    made = on(float32_place, inputs((1, ROWS)))
    labels = torch.where(torch.arange(ROWS) % 3 > 0, 1, -100)[None].to(float32_place.device)
    student = made["hidden"] @ made["weight"].t() + made["bias"]
    teacher = made["teacher_hidden"] @ made["teacher_weight"].t() + made["teacher_bias"]
    leaves = [made["hidden"], made["weight"], made["bias"]]
    for beta in (0.0, 0.1, 0.5, 1.0):
        theirs = trl.GKDTrainer.generalized_jsd_loss(
            student, teacher.detach(), labels, beta=beta, temperature=0.9
        )
        ours = linear_divergence(**made, beta=beta, temperature=0.9, mask=labels != -100)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        wanted = torch.autograd.grad(theirs, leaves, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves), wanted, rtol=1e-4, atol=1e-6)


def test_against_liger(float32_place) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss")
    made = on(float32_place, inputs())
    targets = torch.where(torch.arange(ROWS) % 3 > 0, 1, -100).to(float32_place.device)
    leaves = [made["hidden"], made["weight"], made["bias"]]
    for beta in (0.0, 0.3, 1.0):
        loss = liger.LigerFusedLinearJSDLoss(0.0, 1.0, beta=beta, temperature=2.0, compiled=False)
        theirs = loss(
            made["hidden"],
            made["weight"],
            made["teacher_hidden"].detach(),
            made["teacher_weight"].detach(),
            targets,
            made["bias"],
            made["teacher_bias"].detach(),
        )
        ours = linear_divergence(**made, beta=beta, temperature=2.0, mask=targets != -100)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        wanted = torch.autograd.grad(theirs, leaves)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_total_variation_against_liger() -> None:
    """Liger's is a Triton kernel, which takes the probabilities of both."""
    liger = pytest.importorskip("liger_kernel.ops.tvd")
    made = on(Place("cuda", torch.float32), inputs())
    targets = torch.where(torch.arange(ROWS) % 3 > 0, 1, -100).cuda()
    student = made["hidden"] @ made["weight"].t() + made["bias"]
    teacher = made["teacher_hidden"] @ made["teacher_weight"].t() + made["teacher_bias"]
    theirs = liger.LigerTVDLossFunction.apply(
        student.softmax(-1), teacher.detach().softmax(-1), targets, "batchmean", -100
    )
    ours = linear_divergence(**made, beta=None, mask=targets != -100)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    leaves = [made["hidden"], made["weight"], made["bias"]]
    wanted = torch.autograd.grad(theirs, leaves)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_equals_eager(float32_place, reduction) -> None:
    torch._dynamo.reset()
    backend = "inductor" if float32_place.device == "cuda" else "aot_eager"
    results = []
    for function in (
        linear_divergence,
        torch.compile(linear_divergence, fullgraph=True, backend=backend),
    ):
        made = on(float32_place, inputs(name="softcap"))
        out = function(**made, reduction=reduction, chunk_size=6)
        out.backward(random(*out.shape, seed=3).to(out))
        results.append((out, *(made[k].grad for k in ("hidden", "weight", "bias"))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_refusals() -> None:
    made = inputs()
    for given, complaint in (
        ({"beta": 1.5}, "beta=1.5; expected a number in"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask \(3,\) does not fit"),
        ({"mask": torch.ones(ROWS)}, "mask is torch.float32; expected torch.bool"),
        ({"teacher_hidden": random(5, TEACHER_WIDTH)}, "expected the same tokens"),
        ({"teacher_hidden": random(ROWS, 3)}, r"teacher_hidden \(11, 3\) and teacher_weight"),
        ({"weight": random(VOCAB + 1, WIDTH), "bias": None}, "the same vocabulary"),
        ({"hidden": made["hidden"].float()}, r"hidden is torch.float32 and weight"),
        ({"temperature": 0}, "temperature=0 must be positive"),
        ({"max_scratch_bytes": 100}, "max_scratch_bytes=100 is too small"),
    ):
        made = inputs()
        made["weight"].requires_grad_()
        with pytest.raises(ValueError, match=complaint):
            linear_divergence(**made | given)
