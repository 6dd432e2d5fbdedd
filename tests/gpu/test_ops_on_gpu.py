"""Tests of every op that need a GPU: real sizes, CUDA graphs, 64-bit offsets and the like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.synchronisation import captured, no_synchronisation
from tests.kernels.checks import as_tuple, compare
from tests.kernels.conftest import Place
from tests.kernels.ops_table import CASES, FIRST, Inputs, gradients, leaves, upstreams

pytestmark = pytest.mark.gpu

BFLOAT16 = Place("cuda", torch.bfloat16)
SIZE = (2, 50), 64
# test_head_on_gpu.py tests the linear heads at real sizes and at more than 2^31 logits.
ALL_BUT_HEADS = {n: case for n, case in CASES.items() if not case.op.startswith("linear_")}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def names_and_dtypes() -> list[tuple[str, torch.dtype]]:
    """Return each op's first case in every dtype, and its further cases in bfloat16."""
    return [
        (name, dtype)
        for name in ALL_BUT_HEADS
        for dtype in (DTYPES if name in FIRST else DTYPES[:1])
    ]


def elements_of_a_row(made: Inputs, rows: int) -> int:
    """Return the elements of one row of the widest input; inputs have the shape (1, rows, ...)."""
    tensors = [x for x in made.values() if isinstance(x, Tensor)]
    return max(x.numel() for x in tensors if x.shape[:2] == (1, rows)) // rows


@pytest.mark.parametrize("name, dtype", names_and_dtypes(), ids=str)
def test_real_sizes(name, dtype) -> None:
    """Every size of the op's cases runs, with more rows than all programs take at once."""
    case = CASES[name]
    sizes = max((other.sizes for other in CASES.values() if other.op == case.op), key=len)
    for size in sizes:
        rows = min(1501, 2**22 // elements_of_a_row(case.inputs((1, 1), **size), 1))
        compare(
            case.function,
            case.formula,
            case.inputs((2, rows), **size),
            Place("cuda", dtype),
            constant=case.constant,
            exact_place="cuda",
        )


@pytest.mark.parametrize("name", CASES)
def test_no_host_synchronisation_and_captured_in_a_cuda_graph(name) -> None:
    """A captured forward and backward, replayed on other inputs, gives what eager gives there."""
    case = CASES[name]
    made = leaves(case, case.inputs(*SIZE), BFLOAT16)
    upstream = upstreams(as_tuple(case.function(**made)))

    def step() -> list[Tensor]:
        outputs = as_tuple(case.function(**made))
        return [x.detach() for x in outputs] + gradients(outputs, made, upstream)

    step()  # compiles the kernels
    with no_synchronisation():
        step()
    graph, replayed = captured(step)
    with torch.no_grad():
        for x in (*made.values(), *upstream):
            if isinstance(x, Tensor) and x.ndim:
                x.copy_(x.flip(-1))
    graph.replay()
    for ours, eager in zip(replayed, step()):
        torch.testing.assert_close(ours, eager)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", FIRST)
def test_a_gpu_that_is_not_the_current_one(name) -> None:
    """Forward, and backward in autograd's thread, launch on the GPU of the tensors."""
    case = CASES[name]
    results = []
    for device in ("cuda:0", "cuda:1"):
        made = leaves(case, case.inputs(*SIZE), BFLOAT16._replace(device=device))
        outputs = as_tuple(case.function(**made))
        results.append([*outputs, *gradients(outputs, made, upstreams(outputs))])
        assert torch.cuda.current_device() == 0
    for there, here in zip(*reversed(results)):
        assert there.device.index == 1
        torch.testing.assert_close(there.to(here.device), here, rtol=0, atol=0)


LAST = 3
"""How many rows at the end hold values; the rows before are zero, as are their gradients."""


# The rows of each token's experts would not fit into the memory of a GPU, nor would the states of
# all chunks, nor what PyTorch's own ops make to choose experts in groups or to weigh given ones.
TOO_LARGE = ("expert_mlp", "gated_delta", "routing in groups", "routing of given experts")


@pytest.mark.parametrize(
    "name", [n for n, c in ALL_BUT_HEADS.items() if not {n, c.op} & {*TOO_LARGE}]
)
def test_past_two_to_the_31_elements(name) -> None:
    """The last rows of more than 2^31 elements give the same outputs and gradients as alone."""
    torch.cuda.empty_cache()
    case = CASES[name]
    last = leaves(case, case.inputs((1, LAST), **case.sizes[-1]), BFLOAT16)
    rows = 2**31 // elements_of_a_row(last, LAST) + 2 * LAST

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
