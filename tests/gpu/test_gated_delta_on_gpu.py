"""The gated delta rule at the sizes that its launch configs were chosen for, beside float64.

ptxas 12.8, which Triton 3.6 and 3.7 use for Hopper, compiles some kernels of this kind wrong, so
each variant that a model reaches is compared: documents, states, and numbers of heads.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels import gated_delta
from ligermodels.kernels.checks import DeltaRule
from ligermodels.kernels.gated_delta_decode import gated_delta_decode
from ligermodels.kernels.reference import gated_delta as reference
from ligermodels.kernels.reference.gated_delta_decode import gated_delta_decode_forward

pytestmark = pytest.mark.gpu
NAMES = ("output", "state", "q", "k", "v", "g", "beta", "initial state")
# Of the error that the rounding of a result to 16 bits has. g, beta and states are in float32, but
# they depend on states in 16 bits.
MOST = {"output": 1.2, "q": 1.2, "k": 1.3, "v": 1.2}


@pytest.mark.parametrize("given", [False, True], ids=["from zero", "with states"])
@pytest.mark.parametrize("heads", [(1, 2), (16, 32), (4, 4)])
@pytest.mark.parametrize(
    "lengths", [(1,), (63,), (64,), (65,), (4097,), (700, 0, 1, 64, 130)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_of_128(dtype, lengths, heads, given) -> None:
    draw = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda")

    tokens, (key_heads, count) = sum(lengths), heads
    ends = torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)
    q, k = (F.normalize(random(1, tokens, key_heads, 128), dim=-1) for _ in "qk")
    rows = [x.to(dtype) for x in (q, k, random(1, tokens, count, 128))]
    g = -2 * F.softplus(random(1, tokens, count) - 3)
    leaves = [*rows, g, random(1, tokens, count).sigmoid()]
    states = random(len(lengths), count, 128, 128) / 3
    leaves = [x.requires_grad_() for x in (*leaves, *([states] if given else []))]
    grads = random(1, tokens, count, 128).to(dtype), random(*states.shape) / 3
    out, state = gated_delta(*leaves[:5], ends, *leaves[5:])
    outputs = (out, state) if given else (out,)
    found = [out, state, *torch.autograd.grad(outputs, leaves, grads[: len(outputs)])]

    wide = [x.detach().double() for x in leaves]
    rows = (x.flatten(0, 1) for x in wide[:5])
    rule = DeltaRule(*rows, ends, wide[5] if given else None)
    exact = list(reference.gated_delta_forward(rule, 128**-0.5))
    upstream = grads[0].double().flatten(0, 1), grads[1].double() if given else None
    exact += reference.gated_delta_backward(rule, 128**-0.5, *upstream)[: len(leaves)]
    # The gradient of g at a first token is the sum of S dS, where both have 16 bits: an error of
    # sqrt(2) roundings of each product, of which three standard deviations are allowed. The sum
    # itself may be near zero.
    of_sums = 0.0
    if given:
        relative = (wide[5].to(dtype) - wide[5]).norm() / wide[5].norm()
        of_sums = 3 * 2**0.5 * relative * (wide[5] * exact[-1]).norm()
    for name, ours, theirs in zip(NAMES, found, exact):
        theirs = theirs.view(ours.shape)
        rounding = (theirs.to(dtype) - theirs).norm() if theirs.dtype else 0
        error = (ours.double() - theirs).norm()
        # A state that is given, and what comes out of one, has its own rounding.
        most = MOST.get(name, 6.0) + (0.6 if given else 0.0)
        if name == "g" and not given:
            most = 2.0
        bound = most * rounding + 1e-6 + (of_sums if name == "g" else 0.0)
        assert error <= bound, f"{name}: {error / rounding} of its rounding"


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding_in_a_graph(dtype, tokens, batch) -> None:
    """Outputs and states of two steps are those of float64, and a CUDA graph repeats them."""
    draw = torch.Generator("cuda").manual_seed(0)
    key_heads, heads, channels = 16, 32, 64 * 128

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda").to(dtype)

    steps = [random(batch, tokens, channels + heads * 130) for _ in range(2)]
    weights = random(channels, 4) / 2, random(heads), random(heads), random(128)
    state = random(batch, 3, channels), random(batch, heads, 128, 128).float() / 11
    exact = [x.double() for x in state]
    found = [x.clone() for x in state]
    again = [x.clone() for x in state]
    given = steps[0].clone()
    for step in given, given:  # the first one compiles
        gated_delta_decode(step, weights, again, key_heads, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated = gated_delta_decode(given, weights, again, key_heads, 128)
    for old, new in zip(again, state):
        old.copy_(new)
    for step in steps:
        out = gated_delta_decode(step, weights, found, key_heads, 128)
        wide = step.double(), tuple(x.double() for x in weights)
        want = gated_delta_decode_forward(*wide, exact, key_heads, 128, 1e-6)
        most = 1e-5 if dtype == torch.float32 else 6e-3
        for ours, theirs in zip((out, *found), (want, *exact)):
            assert (ours.double() - theirs).norm() <= most * theirs.norm()
        given.copy_(step)
        graph.replay()
        for ours, one in zip((repeated, *again), (out, *found)):
            torch.testing.assert_close(ours, one, rtol=0, atol=0)
