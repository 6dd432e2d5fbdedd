from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import add_layer_norm, layer_norm
from ligermodels.kernels.launch import Launch, launch_for, num_programs
from tests.kernels import formulas
from tests.kernels.checks import compare, random


def inputs(shape, residual: bool = False, weight: bool = True, bias: bool = True) -> dict:
    made = {
        "x": random(*shape, seed=1, scale=3.0),
        "weight": random(shape[-1], seed=2) if weight else None,
        "bias": random(shape[-1], seed=4) if bias else None,
        # One column equals its mean. A small eps would magnify the rounding error of the zero.
        "eps": 1e-4 if shape[-1] > 1 else 1.0,
    }
    if residual:
        made["residual"] = random(*shape, seed=3)
    return made


# The keys say whether there is a residual. The values are the op, its formula, and a row width at
# which backward reads the next rows ahead.
OPS = {
    False: (layer_norm, formulas.layer_norm, 2056),
    True: (add_layer_norm, formulas.add_layer_norm, 33),
}


def off_centre(shape: tuple[int, ...], residual: bool) -> dict:
    """Make inputs with a mean as large as their deviation, so that ignoring the mean fails."""
    made = inputs(shape, residual)
    return made | {"x": made["x"] + 3.0}


def nvidia_backward(residual: bool, width: int) -> Launch:
    """Return the launch config of the backward kernel for rows of this length."""
    launchers = pytest.importorskip("ligermodels.kernels.triton.layer_norm")
    configs = launchers.ADD_BACKWARD if residual else launchers.BACKWARD
    return launch_for(configs.nvidia, width)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_that_backward_reads_twice(float32_place, residual) -> None:
    """If rows are too long for the registers, the kernel reads them again after its reductions."""
    op, formula, _ = OPS[residual]
    assert nvidia_backward(residual, 8200).reload
    compare(op, formula, off_centre((2, 8200), residual), float32_place)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_that_backward_reads_ahead(float32_place, residual) -> None:
    """In 16 bits and for more than two passes of all programs, backward loads rows early."""
    op, formula, width = OPS[residual]
    setting = nvidia_backward(residual, width)
    assert setting.num_stages > 1
    programs = num_programs(setting, 10**9, torch.device(float32_place.device, 0))
    made = off_centre((2 * programs * setting.rows + 1, width), residual)
    compare(op, formula, made, float32_place._replace(dtype=torch.float16))


def test_one_output_unused(place) -> None:
    """Only the norm's output or only the sum has an upstream gradient."""
    for used in (0, 1):
        compare(
            lambda used=used, **kwargs: add_layer_norm(**kwargs)[used],
            lambda used=used, **kwargs: formulas.add_layer_norm(**kwargs)[used],
            inputs((3, 16), True),
            place,
            frozen=() if used == 0 else ("weight", "bias"),
        )


def test_a_mean_far_from_zero(place) -> None:
    """The variance is exact around a large mean. Subtracting squares would lose it."""
    row = torch.tensor([1.0, 2.0, 3.0, 4.0]) + (128 if place.dtype == torch.bfloat16 else 4096)
    y = layer_norm(row.to(place.dtype).to(place.device)[None], eps=0.0)
    expected = formulas.layer_norm(row.to(place.dtype).double()[None], eps=0.0)
    torch.testing.assert_close(y.double().cpu(), expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("width", [3, 577, 4096])
def test_rows_of_equal_values_are_zero(float32_place, width) -> None:
    """The mean must be exact, because its rounding error would be divided by sqrt(eps)."""
    values = torch.tensor([3.1, 100.3, 1000.7, -0.1]).to(float32_place.device)
    x = values[:, None].expand(-1, width).contiguous()
    assert torch.equal(layer_norm(x), torch.zeros_like(x))
    assert torch.equal(layer_norm(x, bias=x[2]), x[2].expand_as(x))


def test_residual_in_a_wider_dtype(float32_place) -> None:
    """The sum of a bfloat16 x and a float32 residual is float32, and so is its gradient."""
    made = inputs((3, 16), True)
    x = made["x"].to(torch.bfloat16).to(float32_place.device).requires_grad_()
    residual = made["residual"].float().to(float32_place.device).requires_grad_()
    weight = made["weight"].to(torch.bfloat16).to(float32_place.device).requires_grad_()
    bias = made["bias"].float().to(float32_place.device).requires_grad_()
    y, s = add_layer_norm(x, residual, weight, bias)
    assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)
    (y.float().square().sum() + s.sum()).backward()
    leaves = (x, residual, weight, bias)
    assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]
    exact = [t.detach().double().cpu().requires_grad_() for t in leaves]
    want_y, want_s = formulas.add_layer_norm(*exact)
    (want_y.square().sum() + want_s.sum()).backward()
    torch.testing.assert_close(s.double().cpu(), want_s, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y.double().cpu(), want_y, rtol=1e-2, atol=1e-2)
    for leaf, want in zip(leaves, exact):
        torch.testing.assert_close(leaf.grad.double().cpu(), want.grad, rtol=2e-2, atol=5e-2)


def test_refusals() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"weight \(3,\) does not fit .* expected \(4,\)"):
        layer_norm(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"bias \(1, 4\) does not fit"):
        layer_norm(x, None, torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"torch.int64; expected a floating point"):
        layer_norm(x.long())
    with pytest.raises(ValueError, match="differ in shape"):
        add_layer_norm(x, torch.ones(1, 4))
