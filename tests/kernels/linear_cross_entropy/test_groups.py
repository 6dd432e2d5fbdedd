"""A loss of whole sequences, against the same loss of `linear_log_probs`, which costs a product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import linear_cross_entropy, linear_group_loss
from tests.kernels.conftest import INTERPRETING, PLACES
from tests.kernels.linear_cross_entropy import head
from tests.kernels.linear_cross_entropy.head import LEAVES, VOCAB, WIDTH, on
from tests.pairwise import pairwise

BATCH, SEQ = 8, 6
NAMES = ("log_probs", "entropy", "sum_sq_probs")


def pair_loss(tokens, sequences: slice) -> torch.Tensor:
    """Compute DPO's loss of the pairs, less an entropy, as a part of the mean over all pairs."""
    scores = tokens.log_probs.sum(-1) - torch.arange(BATCH).to(tokens.loss)[sequences] / 10
    margins = scores[::2] - scores[1::2]
    extra = tokens.entropy.square().sum() + tokens.sum_sq_probs.sum() + tokens.loss.sum()
    picked = tokens.alternative_log_probs
    return (-F.logsigmoid(0.3 * margins).sum() - 0.1 * extra + picked.exp().sum()) / (BATCH // 2)


def inputs(**options: float) -> dict:
    made = head.inputs((BATCH, SEQ), **options)
    del made["chunk_size"]
    made["targets"][1, 2:] = made["targets"][5] = -100
    made["alternatives"] = torch.stack((made["targets"], made["targets"] % VOCAB), -1)
    return made


def wanted(made: dict, loss_function=pair_loss) -> tuple[torch.Tensor, ...]:
    out = linear_cross_entropy(**made, reduction="none", return_token_stats=NAMES)
    loss = loss_function(out, slice(0, BATCH))
    return loss, *torch.autograd.grad(loss, trained(made))


def trained(made: dict) -> list[torch.Tensor]:
    return [made[name] for name in LEAVES if made[name].requires_grad]


CUTS = {
    "one chunk": {},
    "a pair": {"chunk_size": 2 * SEQ},
    "two pairs and some rows": {"chunk_size": 5 * SEQ},
    "less than a pair": {"chunk_size": SEQ},
    "a small budget": {"max_scratch_bytes": 19000},
}


@pairwise(
    indirect=["place"],
    place=PLACES,
    cut=CUTS,
    skip_ignored=[False, True],
    frozen=[(), *(tuple(other for other in LEAVES if other != name) for name in LEAVES)],
)
def test_the_loss_of_pairs(place, cut, skip_ignored, frozen) -> None:
    if INTERPRETING and cut != "a pair":
        pytest.skip("other tests run the same kernels in the interpreter")
    made = on(place, inputs(softcap=3.0), frozen)
    if place.dtype == torch.float64 and "max_scratch_bytes" in CUTS[cut]:
        pytest.skip("float64 needs a larger budget")
    options = CUTS[cut] | {"skip_ignored": skip_ignored}
    loss = linear_group_loss(
        **made, loss_function=pair_loss, group_size=2, return_token_stats=NAMES, **options
    )
    grads = torch.autograd.grad(loss * 2, trained(made))
    tolerance = 2e-2 if place.dtype == torch.bfloat16 else 1e-5
    exact = wanted(made)
    torch.testing.assert_close(loss, exact[0], rtol=tolerance, atol=tolerance)
    for grad, want in zip(grads, exact[1:]):
        assert grad.dtype == place.dtype
        error = (grad - 2 * want).norm() / (2 * want).norm()
        assert error <= tolerance


@pytest.mark.skipif(INTERPRETING, reason="matrix products run outside the Triton kernels")
def test_number_of_products(float32_place) -> None:
    made = on(float32_place, inputs())
    rows = BATCH * SEQ
    for options, products in (
        ({}, 3),
        ({"chunk_size": 2 * SEQ}, 3),
        ({"chunk_size": 2 * SEQ - 1}, 4),
    ):
        with FlopCounterMode(display=False) as counter:
            linear_group_loss(
                **made, loss_function=pair_loss, group_size=2, return_token_stats=NAMES, **options
            ).backward()
        assert counter.get_total_flops() == products * 2 * rows * WIDTH * VOCAB, options


def test_a_loss_without_a_gradient(float32_place) -> None:
    """A part that depends on no token, and a call without gradients."""
    made = on(float32_place, inputs())

    def first_part(tokens, sequences):
        part = tokens.log_probs.sum()
        return part if sequences.start == 0 else part.detach() * 0

    loss = linear_group_loss(**made, loss_function=first_part, chunk_size=SEQ)
    loss.backward()
    assert (made["hidden"].grad[0] != 0).any() and (made["hidden"].grad[1:] == 0).all()
    with torch.no_grad():
        again = linear_group_loss(**made, loss_function=first_part, chunk_size=SEQ)
    assert torch.equal(again, loss.detach()) and not again.requires_grad


def step(**made) -> torch.Tensor:
    return linear_group_loss(
        **made, loss_function=pair_loss, group_size=2, return_token_stats=NAMES
    )


@pytest.mark.skipif(INTERPRETING, reason="a bare launch cannot be traced in the interpreter")
def test_compiled(float32_place) -> None:
    """torch.compile cannot trace a gradient in forward, so it takes the way with four products."""
    torch._dynamo.reset()
    backend = "inductor" if float32_place.device == "cuda" else "aot_eager"
    made = on(float32_place, inputs())
    leaves, expected = trained(made), wanted(made)
    loss = torch.compile(step, fullgraph=True, backend=backend)(**made)
    found = loss, *torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
