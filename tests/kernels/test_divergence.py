"""The divergence of a student from a teacher, against KL divergences in float64.

`test_grid.py` tests sizes, layouts, frozen inputs, autocast's gradients and retained graphs.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_divergence
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.conftest import INTERPRETING, PLACES
from tests.kernels.linear_cross_entropy.head import on
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


@pairwise(
    indirect=["place"],
    place=PLACES,
    name=OPTIONS,
    beta=[0.0, 0.1, 0.5, 1.0, None],
    reduction=["mean", "sum", "none"],
    tokens=["all", "masked", "weighted"],
    chunk_size=[None, 5],
    vocab=[VOCAB, 1025],  # also the edge of a block
)
def test_options(place, name, beta, reduction, tokens, chunk_size, vocab) -> None:
    made = inputs(vocab=vocab, name=name) | {
        "beta": beta,
        "reduction": reduction,
        "chunk_size": chunk_size,
    }
    if tokens == "masked":
        made["mask"] = torch.arange(ROWS) % 3 > 0
    elif tokens == "weighted":
        made["token_weights"] = random(ROWS, seed=8)
    compare(linear_divergence, formulas.linear_divergence, made, place, constant=CONSTANT)


def test_the_same_distribution_has_no_divergence(place) -> None:
    made = on(place, inputs())
    for name in ("hidden", "weight", "bias"):
        made[f"teacher_{name}"] = made[name].detach()
    of_one_class = on(place, inputs(vocab=1))
    assert (linear_divergence(**of_one_class, reduction="none").abs() <= 1e-6).all()
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


def test_a_logit_that_is_no_number_makes_the_loss_none(float32_place) -> None:
    for name in ("bias", "teacher_bias"):
        made = on(float32_place, inputs())
        made[name] = made[name].detach()
        made[name][3] = float("nan")
        for beta in (0.0, 0.5, 1.0, None):
            assert linear_divergence(**made, beta=beta, reduction="none").isnan().all(), beta


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
def test_scratch_stays_within_the_budget(compiled_place, reduction) -> None:
    made = on(compiled_place, inputs((2000,), 300))
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
