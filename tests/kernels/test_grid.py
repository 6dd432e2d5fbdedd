"""Every op of the table: precision at all sizes, layouts and dtypes, and what all ops share."""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from tests.kernels.checks import LAYOUTS, check_repeatable, compare
from tests.kernels.conftest import INTERPRETING
from tests.kernels.ops_table import (
    CASES,
    NOT_FUSED,
    SIZES,
    differentiable,
    leaves,
    outputs_and_gradients,
)

INPUTS = [(name, key) for name, case in CASES.items() for key in differentiable(case)]


def check(name: str, place, size: str = "odd", **options) -> None:
    case = CASES[name]
    made = case.inputs(*SIZES[size])
    compare(
        case.function,
        case.formula,
        made,
        place,
        constant=case.constant,
        outputs=case.outputs,
        **options,
    )


def test_every_op_is_in_the_table() -> None:
    public, tabled = set(kernels.__all__) - NOT_FUSED, {case.op for case in CASES.values()}
    assert not public - tabled, f"no case in tests/kernels/ops_table.py: {public - tabled}"
    assert not tabled - public, f"not in __all__ of ligermodels.kernels: {tabled - public}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_sizes(every_place, name, size) -> None:
    check(name, every_place, size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_layouts(every_place, name, layout) -> None:
    check(name, every_place, "batch", layout=layout)


@pytest.mark.parametrize("name, key", INPUTS)
def test_frozen_in_turn(every_place, name, key) -> None:
    """One input frozen, and all but that one."""
    rest = [other for other in differentiable(CASES[name]) if other != key]
    check(name, every_place, frozen=[key])
    check(name, every_place, frozen=rest)


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_autocast(float32_place, name, dtype, inside) -> None:
    """float32 parameters get float32 gradients; the error is that of eager under autocast."""
    if INTERPRETING and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off where a GPU rounds")
    check(name, float32_place, autocast=dtype, backward_inside=inside)


@pytest.mark.parametrize("name", CASES)
def test_twice_over_a_retained_graph(place, name) -> None:
    case = CASES[name]
    made = case.inputs(*SIZES["batch"])
    check_repeatable(case.function, made, place, case.constant)


@pytest.mark.parametrize("name", CASES)
def test_bitwise_the_same_from_run_to_run(every_place, name) -> None:
    if INTERPRETING:
        pytest.skip("the interpreter runs one program after the other")
    case = CASES[name]
    shape = ((3, 100), 64) if every_place.device == "cpu" else ((7, 300), 1024)
    made = leaves(case, case.inputs(*shape), every_place)
    first = outputs_and_gradients(case.function, made)
    for again, expected in zip(outputs_and_gradients(case.function, made), first):
        assert torch.equal(again, expected)
