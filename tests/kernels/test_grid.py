"""What every op must satisfy: precision, autocast, retained graphs, repeatable runs."""

from __future__ import annotations

import pytest
import torch

from ligermodels import kernels
from tests.kernels.checks import LAYOUTS, check_repeatable, compare
from tests.kernels.conftest import (
    BFLOAT16,
    EVERY_PLACE,
    FLOAT32,
    FLOAT32_PLACES,
    INTERPRETING,
    Place,
    places,
)
from tests.kernels.ops_table import (
    CASES,
    FIRST,
    NOT_FUSED,
    SIZES,
    differentiable,
    leaves,
    outputs_and_gradients,
)
from tests.pairwise import pairwise

# For each case: no frozen input, each input frozen alone, and all inputs frozen except each one.
# Their numbers, which all ops share, spread the pairs over the ops; a name would be of one or two.
FROZEN: dict[str, dict[str, list[str]]] = {name: {"nothing": []} for name in CASES}
for _name, _case in CASES.items():
    for _i, _key in enumerate(_keys := differentiable(_case)):
        FROZEN[_name][f"input {_i}"] = [_key]
        if len(_keys) > 1:
            FROZEN[_name][f"all but input {_i}"] = [key for key in _keys if key != _key]

# Ops with several outputs that have a gradient, of which a caller may use one alone.
OUTPUTS = {"add_rms_norm": 2, "add_layer_norm": 2, "norm_linear": 2, "norm_qkv_rope": 4}
OUTPUTS |= {"rope": 3, "qk_norm_rope": 3}

# The interpreter truncates to bfloat16, while a GPU rounds.
LOW_DTYPES = [torch.float16] if INTERPRETING else [torch.bfloat16, torch.float16]
NO_ELEMENTS = ("no rows", "empty batch")
UNUSUAL = ("one row", "one column", "empty batch", "no leading dimension")
# Only here do all layouts differ from each other; only a batch can be expanded.
LONG_ROWS = ("odd", "batch", "more rows than programs", "more columns than a block")


def frozen_fits_the_case(name: str, frozen: str, size: str) -> bool:
    """The interpreter, which is slow, meets frozen inputs in the first case of each op."""
    if frozen == "nothing":
        return True
    met = name in FIRST or not INTERPRETING
    return met and frozen in FROZEN[name] and size not in NO_ELEMENTS


def layout_fits_the_case(name: str, layout: str) -> bool:
    """The interpreter, which is slow, meets layouts in the first case of each op."""
    return layout == "contiguous" or name in FIRST or not INTERPRETING


def interpreter_is_fast_enough(name: str, size: str, layout: str, frozen: str) -> bool:
    """The gated delta rule and the further cases of experts meet the usual inputs there.

    Otherwise their kernels would take seconds.
    """
    usual = size == "odd" and layout in ("contiguous", "strided") and frozen == "nothing"
    slow = CASES[name].op.startswith("gated_delta")
    slow |= CASES[name].op == "expert_mlp" and name not in FIRST
    return usual or not INTERPRETING or not slow


def layout_fits_the_size(layout: str, size: str) -> bool:
    sizes = ("batch",) if layout in ("expanded", "heads first") else LONG_ROWS
    return layout == "contiguous" or size in sizes


def size_fits_the_case(name: str, size: str) -> bool:
    """The first case of each op meets every size; the op's further cases meet the usual ones."""
    return name in FIRST or size not in UNUSUAL


def test_every_op_is_in_the_table() -> None:
    public, tabled = set(kernels.__all__) - NOT_FUSED, {case.op for case in CASES.values()}
    assert not public - tabled, f"tests/kernels/ops_table.py has no case for {public - tabled}"
    assert not tabled - public, f"__all__ of ligermodels.kernels lacks {tabled - public}"


@pairwise(
    frozen_fits_the_case,
    layout_fits_the_case,
    interpreter_is_fast_enough,
    layout_fits_the_size,
    size_fits_the_case,
    indirect=["every_place"],
    every_place=EVERY_PLACE,
    name=CASES,
    size=SIZES,
    layout=LAYOUTS,
    frozen=dict.fromkeys(key for keys in FROZEN.values() for key in keys),
)
def test_precision(every_place, name, size, layout, frozen) -> None:
    """Compare with float64 at every size, layout and choice of frozen inputs."""
    case = CASES[name]
    compare(
        case.function,
        case.formula,
        case.inputs(*SIZES[size]),
        every_place,
        frozen=FROZEN[name][frozen],
        constant=case.constant,
        layout=layout,
    )


@pytest.mark.parametrize("name, used", [(op, i) for op, n in OUTPUTS.items() for i in range(n)])
def test_one_output_used(float32_place, name, used) -> None:
    """An output that nothing reads adds no gradient and raises no error."""
    case = CASES[name]
    made = case.inputs(*SIZES["batch"])
    compare(case.function, case.formula, made, float32_place, used=used, constant=case.constant)


@pairwise(
    lambda name, dtype: name in FIRST or dtype == LOW_DTYPES[0],
    indirect=["float32_place"],
    float32_place=FLOAT32_PLACES,
    name=CASES,
    dtype=LOW_DTYPES,
    backward=["backward after", "backward inside"],
)
def test_autocast(float32_place, name, dtype, backward) -> None:
    """float32 parameters get float32 gradients, with the errors of eager under autocast."""
    case = CASES[name]
    compare(
        case.function,
        case.formula,
        case.inputs(*SIZES["odd"]),
        float32_place,
        constant=case.constant,
        autocast=dtype,
        backward_inside=backward == "backward inside",
    )


@pytest.mark.parametrize("name", [name for name in FIRST if name != "linear_divergence"])
def test_autocast_changes_nothing_in_its_dtype(name) -> None:
    """No op loses the float32 of its sums; only the teacher of a divergence has another dtype."""
    case = CASES[name]
    made = leaves(case, case.inputs(*SIZES["odd"]), Place("cpu", torch.bfloat16))
    expected = outputs_and_gradients(case.function, made)
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs_and_gradients(case.function, made)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("place", places(FLOAT32, gpu=(BFLOAT16,)), indirect=True)
@pytest.mark.parametrize("name", FIRST if INTERPRETING else CASES)
def test_twice_over_a_retained_graph(place, name) -> None:
    case = CASES[name]
    made = leaves(case, case.inputs(*SIZES["odd"]), place)
    check_repeatable(case.function, made, place.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_bitwise_the_same_from_run_to_run(name) -> None:
    """Programs of a GPU run in any order, and the results must not depend on it."""
    case = CASES[name]
    made = leaves(case, case.inputs((7, 300), 1024), Place("cuda", FLOAT32))
    first = outputs_and_gradients(case.function, made)
    for again, expected in zip(outputs_and_gradients(case.function, made), first):
        assert torch.equal(again, expected)
