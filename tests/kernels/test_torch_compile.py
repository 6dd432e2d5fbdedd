"""torch.compile(fullgraph=True) of every op of the table, and the operators that ops register."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.kernels import dispatch
from tests.kernels.conftest import BFLOAT16, FLOAT32, Place, places
from tests.kernels.ops_table import CASES, FIRST, leaves, outputs_and_gradients

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="a launch in the interpreter cannot be traced"
)
TOLERANCE = {BFLOAT16: 1e-2, FLOAT32: 1e-5}


def compiled(place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    backend = "inductor" if place.device == "cuda" else "aot_eager"
    return torch.compile(function, fullgraph=True, backend=backend)


# Compiled models, linear_cross_entropy/test_values.py and glu hold these. They take seconds here.
ELSEWHERE = {"add_rms_norm", "norm_linear", "norm_qkv_rope", "qk_norm_rope", "glu_linear"}
ELSEWHERE |= {
    "linear_cross_entropy",
    "linear_log_probs",
    "gated_delta",
    "gated_delta_layer",
    "output_gate",
    "gate_linear",
}
SHORT = set(FIRST) - ELSEWHERE


# test_registered_operators checks the other dtypes of what is traced.
@pytest.mark.parametrize("place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in CASES],
)
def test_equals_eager(place, name) -> None:
    """The second length makes torch.compile trace the length as a symbol."""
    case, tolerance = CASES[name], TOLERANCE[place.dtype]
    function = compiled(place, lambda **inputs: case.function(**inputs))
    for leading in ((2, 3), (2, 5)):
        made = leaves(case, case.inputs(leading, 24), place)
        if "chunk_size" in made:
            made["chunk_size"] = 6  # one chunk, then two
        expected = outputs_and_gradients(case.function, made)
        for ours, eager in zip(outputs_and_gradients(function, made), expected, strict=True):
            torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


def test_a_compiled_backward_is_without_autocast() -> None:
    """The whole op is compiled under autocast, as gated_delta is in a model."""

    def product(x: torch.Tensor) -> torch.Tensor:
        with dispatch.without_autocast(x):
            return dispatch.Product.apply(x, 2 * x)

    x = torch.rand(4, 4, requires_grad=True)
    exact = torch.autograd.grad(product(x).sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(product, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), exact, rtol=0, atol=0)


def test_what_is_traced_equals_eager(monkeypatch) -> None:
    """Some ops take another way while they are compiled; without a compiler it gives the same."""
    for name, case in CASES.items():
        made = leaves(case, case.inputs((2, 3), 24), Place("cpu", FLOAT32))
        eager = outputs_and_gradients(case.function, made)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            ours = outputs_and_gradients(case.function, made)
        torch.testing.assert_close(ours, eager, msg=lambda text, name=name: f"{name}: {text}")


def registered() -> set[str]:
    """Return the operators of the kernels; those of attention are tested with it."""
    names = torch._C._dispatch_get_all_op_names()
    of_attention = "ligermodels::sunk", "ligermodels::in_memory"
    return {x for x in names if x.startswith("ligermodels::") and not x.startswith(of_attention)}


class Recorder(TorchDispatchMode):
    """Records every call of an operator that this package registers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "ligermodels":

            def copy(x: Any) -> Any:
                return x.detach().clone() if isinstance(x, torch.Tensor) else x

            copies = tuple(map(copy, args)), {k: copy(v) for k, v in kwargs.items()}
            self.calls.append((function, *copies))
        return function(*args, **kwargs)


def test_registered_operators(every_place) -> None:
    """Each passes torch.library.opcheck (schema, fake tensors, AOT dispatch) as the ops call it."""
    recorder = Recorder()
    for case in CASES.values():
        made = leaves(case, case.inputs((5,), 24), every_place)
        with recorder:
            outputs_and_gradients(case.function, made)
    assert registered()
    assert {function.name().split(".")[0] for function, *_ in recorder.calls} == registered()
    checked = set()
    for function, args, kwargs in recorder.calls:
        kind = function, *(x.shape if isinstance(x, torch.Tensor) else x for x in args)
        if kind not in checked:
            torch.library.opcheck(function, args, kwargs)
            checked.add(kind)
