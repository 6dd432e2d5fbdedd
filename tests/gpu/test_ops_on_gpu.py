"""What only a GPU can show of every op: CUDA graphs, no host synchronisation, 64-bit offsets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.synchronisation import no_synchronisation
from tests.kernels.checks import as_tuple
from tests.kernels.conftest import Place
from tests.kernels.ops_table import CASES, gradients, leaves, upstreams

pytestmark = pytest.mark.gpu

BFLOAT16 = Place("cuda", torch.bfloat16)
SIZE = (2, 50), 64


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    return Place("cuda", request.param)


@pytest.mark.parametrize("name", CASES)
def test_no_host_synchronisation(place, name) -> None:
    """Neither forward nor backward waits for the GPU, once the kernels are compiled."""
    case = CASES[name]
    made = leaves(case, case.inputs(*SIZE), place)
    outputs = as_tuple(case.function(**made))
    upstream = upstreams(outputs)
    gradients(outputs, made, upstream)
    with no_synchronisation():
        gradients(as_tuple(case.function(**made)), made, upstream)


def test_synchronisation_is_noticed() -> None:
    """The check above fails where something does wait."""
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronisation():
        x.sum().item()


@pytest.mark.parametrize("name", CASES)
def test_captured_in_a_cuda_graph(place, name) -> None:
    """Forward and backward captured once and replayed on other inputs equal eager on those."""
    case = CASES[name]
    made = leaves(case, case.inputs(*SIZE), place)
    upstream = upstreams(as_tuple(case.function(**made)))

    def step() -> list[Tensor]:
        outputs = as_tuple(case.function(**made))
        return [x.detach() for x in outputs] + gradients(outputs, made, upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    with torch.no_grad():
        for x in (*made.values(), *upstream):
            if isinstance(x, Tensor) and x.ndim:
                x.copy_(x.flip(-1))
    graph.replay()
    for ours, eager in zip(replayed, step()):
        torch.testing.assert_close(ours, eager)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_that_is_not_the_current_one(place, name) -> None:
    """Forward, and backward from a thread of its own, launch where the tensors are."""
    case = CASES[name]
    results = []
    for device in ("cuda:0", "cuda:1"):
        made = leaves(case, case.inputs(*SIZE), place._replace(device=device))
        outputs = as_tuple(case.function(**made))
        results.append([*outputs, *gradients(outputs, made, upstreams(outputs))])
        assert torch.cuda.current_device() == 0
    for there, here in zip(*reversed(results)):
        assert there.device.index == 1
        torch.testing.assert_close(there.to(here.device), here, rtol=0, atol=0)


LAST = 3
"""Rows at the end that hold something; all before are zero and get no upstream gradient."""

# The length of a row and how many elements the largest tensor has of each.
LONG_ROWS = {
    "rms_norm": (16384, 16384),
    "add_rms_norm": (16384, 16384),
    "layer_norm": (16384, 16384),
    "add_layer_norm": (16384, 16384),
    "glu": (8192, 2 * 8192),
    "swiglu": (8192, 2 * 8192),
    "geglu": (8192, 2 * 8192),
    "rope": (64, 5 * 2 * 64),
    "qk_norm_rope": (64, 5 * 2 * 64),
    "norm_linear": (16384, 16384),
    "norm_qkv_rope": (16384, 16384),
    "glu_linear": (8192, 2 * 8192),
    "cross_entropy": (128256, 128256),
    "cross_entropy of each row": (128256, 128256),
}


def test_every_op_has_long_rows() -> None:
    """But the linear heads, whose logits past 2^31 elements are tested with their chunks."""
    ops = {case.op for case in CASES.values() if not case.op.startswith("linear_")}
    assert {CASES[name].op for name in LONG_ROWS} == ops


@pytest.mark.parametrize("name", LONG_ROWS)
def test_past_two_to_the_31_elements(name) -> None:
    """The last rows of more than 2^31 elements give what they give alone, forward and backward."""
    torch.cuda.empty_cache()
    case = CASES[name]
    width, elements = LONG_ROWS[name]
    rows = 2**31 // elements + 2 * LAST
    last = leaves(case, case.inputs((1, LAST), width), BFLOAT16)

    def is_of_rows(x: object) -> bool:
        return isinstance(x, Tensor) and x.shape[:2] == (1, LAST)

    def embedded(x: Tensor) -> Tensor:
        fill = -100 if x.dtype == torch.int64 else 0
        whole = x.new_full((1, rows, *x.shape[2:]), fill)
        whole[:, -LAST:] = x.detach()
        return whole.requires_grad_(x.requires_grad)

    whole = {key: embedded(x) if is_of_rows(x) else x for key, x in last.items()}
    assert max(x.numel() for x in whole.values() if isinstance(x, Tensor)) > 2**31

    expected = as_tuple(case.function(**last))
    upstream = upstreams(expected)
    outputs = as_tuple(case.function(**whole))
    for ours, want in zip(outputs, expected):
        if is_of_rows(want):
            ours = ours[:, -LAST:]
        torch.testing.assert_close(ours, want, rtol=1e-2, atol=1e-2)

    wanted = gradients(expected, last, upstream)
    upstream = [embedded(x) if is_of_rows(x) else x for x in upstream]
    for ours, want in zip(gradients(outputs, whole, upstream), wanted):
        if is_of_rows(want):
            assert ours[:, :1000].count_nonzero() == 0
            ours = ours[:, -LAST:]
        scale = float(want.abs().max())
        torch.testing.assert_close(ours, want, rtol=2e-2, atol=1e-2 * scale)
