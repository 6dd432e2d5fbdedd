"""RMS norm and layer norm: long rows, extreme values, and residuals of another dtype."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from ligermodels import kernels
from ligermodels.kernels.launch import Launch, launch_for, num_programs
from tests.kernels import formulas
from tests.kernels.checks import compare, random
from tests.kernels.ops_table import CASES, norm

NORMS = ["rms_norm", "layer_norm"]


@pytest.mark.parametrize("casting_mode, offset", [("gemma", 0.0), ("llama", 1.0)])
def test_casting_without_its_offset(place, casting_mode, offset) -> None:
    made = norm((3,), 33, casting_mode=casting_mode, offset=offset)
    compare(kernels.rms_norm, formulas.rms_norm, made, place)


def nvidia_backward(name: str, residual: bool, width: int) -> Launch:
    """Return the launch config of the backward kernel for rows of this length."""
    pytest.importorskip("triton")
    launchers = import_module("ligermodels.kernels.triton.norms")
    of_layer_norm = "CENTRED_ADD_BACKWARD" if residual else "CENTRED_BACKWARD"
    configs = getattr(launchers, of_layer_norm if name == "layer_norm" else "BACKWARD")
    return launch_for(configs.nvidia, width)


def check(name: str, residual: bool, rows: int, width: int, place) -> None:
    """Compare at a mean as large as the deviation, so that ignoring the mean fails."""
    case = CASES[f"add_{name}" if residual else name]
    made = case.inputs((rows,), width)
    made["x"] = made["x"] + 3.0
    if name == "rms_norm":
        made["offset"] = 1.0
    compare(case.function, case.formula, made, place)


@pytest.mark.parametrize("name, residual", [("rms_norm", True), ("layer_norm", False)])
def test_rows_that_backward_reads_twice(float32_place, name, residual) -> None:
    """If rows are too long for the registers, the kernel reads them again after its reductions."""
    assert nvidia_backward(name, residual, 8200).reload
    check(name, residual, 2, 8200, float32_place)


# Layer norm without a residual reads only longer rows ahead.
@pytest.mark.parametrize(
    "name, residual, width",
    [
        ("rms_norm", False, 33),
        ("rms_norm", True, 33),
        ("layer_norm", False, 2056),
        ("layer_norm", True, 33),
    ],
)
def test_rows_that_backward_reads_ahead(float32_place, name, residual, width) -> None:
    """In 16 bits and for more than two passes of all programs, backward loads rows early."""
    setting = nvidia_backward(name, residual, width)
    assert setting.num_stages > 1
    programs = num_programs(setting, 10**9, torch.device(float32_place.device, 0))
    place = float32_place._replace(dtype=torch.float16)
    check(name, residual, 2 * programs * setting.rows + 1, width, place)


def test_large_values_do_not_overflow(place) -> None:
    x = torch.full((2, 8), 1e15, dtype=place.dtype, device=place.device)
    y = kernels.rms_norm(x, torch.ones(8, dtype=place.dtype, device=place.device))
    torch.testing.assert_close(y, torch.ones_like(y))


def test_a_mean_far_from_zero(place) -> None:
    """The variance is exact around a large mean. Subtracting squares would lose it."""
    row = torch.tensor([1.0, 2.0, 3.0, 4.0]) + (128 if place.dtype == torch.bfloat16 else 4096)
    y = kernels.layer_norm(row.to(place.dtype).to(place.device)[None], eps=0.0)
    expected = formulas.layer_norm(row.to(place.dtype).double()[None], eps=0.0)
    torch.testing.assert_close(y.double().cpu(), expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("width", [3, 577, 4096])
def test_rows_of_equal_values_are_zero(float32_place, width) -> None:
    """The mean must be exact, because its rounding error would be divided by sqrt(eps)."""
    values = torch.tensor([3.1, 100.3, 1000.7, -0.1]).to(float32_place.device)
    x = values[:, None].expand(-1, width).contiguous()
    assert torch.equal(kernels.layer_norm(x), torch.zeros_like(x))
    assert torch.equal(kernels.layer_norm(x, bias=x[2]), x[2].expand_as(x))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_residual_in_a_wider_dtype(float32_place, name, wide) -> None:
    """The sum has the residual's dtype, and so has its gradient."""
    low, device = torch.bfloat16, float32_place.device
    made = {"x": low, "residual": wide, "weight": low} | ({"bias": wide} if "layer" in name else {})
    leaves = {
        key: random(*((16,) if key in ("weight", "bias") else (3, 16)), seed=i)
        .to(device, dtype)
        .requires_grad_()
        for i, (key, dtype) in enumerate(made.items())
    }
    y, s = getattr(kernels, f"add_{name}")(**leaves)
    assert (y.dtype, s.dtype) == (low, wide)
    (y.double().square().sum() + s.sum()).backward()
    exact = {k: x.detach().double().requires_grad_() for k, x in leaves.items()}
    want_y, want_s = getattr(formulas, f"add_{name}")(**exact)
    (want_y.square().sum() + want_s.sum()).backward()
    assert torch.equal(s, want_s.to(wide))
    torch.testing.assert_close(y.double(), want_y, rtol=1e-2, atol=1e-2)
    for key, leaf in leaves.items():
        assert leaf.grad.dtype == leaf.dtype
        torch.testing.assert_close(leaf.grad.double(), exact[key].grad, rtol=2e-2, atol=5e-2)
