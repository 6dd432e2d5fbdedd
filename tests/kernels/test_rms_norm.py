from __future__ import annotations

import pytest
import torch

from ligermodels.kernels import add_rms_norm, rms_norm
from ligermodels.kernels.launch import Launch, launch_for, num_programs
from tests.kernels import formulas
from tests.kernels.checks import compare, random


def inputs(shape: tuple[int, ...], residual: bool) -> dict:
    made = {"x": random(*shape, seed=1, scale=3.0), "weight": random(shape[-1], seed=2)}
    if residual:
        made["residual"] = random(*shape, seed=3)
    return made


# The keys say whether there is a residual. The values are the op and its formula.
OPS = {False: (rms_norm, formulas.rms_norm), True: (add_rms_norm, formulas.add_rms_norm)}


@pytest.mark.parametrize("casting_mode, offset", [("gemma", 0.0), ("llama", 1.0)])
def test_casting_without_its_offset(place, casting_mode, offset) -> None:
    options = {"casting_mode": casting_mode, "offset": offset, "eps": 1e-5}
    compare(rms_norm, formulas.rms_norm, inputs((3, 33), False) | options, place)


def nvidia_backward(residual: bool, width: int) -> Launch:
    """Return the launch config of the backward kernel for rows of this length."""
    launchers = pytest.importorskip("ligermodels.kernels.triton.rms_norm")
    configs = launchers.ADD_BACKWARD if residual else launchers.BACKWARD
    return launch_for(configs.nvidia, width)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_that_backward_reads_twice(float32_place, residual) -> None:
    """If rows are too long for the registers, the kernel reads them again after its reduction."""
    op, formula = OPS[residual]
    assert nvidia_backward(residual, 8200).reload
    compare(op, formula, inputs((2, 8200), residual) | {"offset": 1.0}, float32_place)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_that_backward_reads_ahead(float32_place, residual) -> None:
    """In 16 bits and for more than two passes of all programs, backward loads rows early."""
    op, formula = OPS[residual]
    setting = nvidia_backward(residual, 33)
    assert setting.num_stages > 1
    programs = num_programs(setting, 10**9, torch.device(float32_place.device, 0))
    made = inputs((2 * programs * setting.rows + 1, 33), residual) | {"offset": 1.0}
    compare(op, formula, made, float32_place._replace(dtype=torch.float16))


def test_one_output_unused(place) -> None:
    """Only the norm's output or only the sum has an upstream gradient."""
    for used in (0, 1):
        compare(
            lambda used=used, **kwargs: add_rms_norm(**kwargs)[used],
            lambda used=used, **kwargs: formulas.add_rms_norm(**kwargs)[used],
            inputs((3, 16), True),
            place,
            frozen=() if used == 0 else ("weight",),
        )


def test_large_values_do_not_overflow(place) -> None:
    x = torch.full((2, 8), 1e15, dtype=place.dtype, device=place.device)
    y = rms_norm(x, torch.ones(8, dtype=place.dtype, device=place.device))
    torch.testing.assert_close(y, torch.ones_like(y))


def test_residual_in_a_wider_dtype(float32_place) -> None:
    """The sum of a bfloat16 x and a float32 residual is float32, and so is its gradient."""
    x = random(3, 16, seed=1).to(torch.bfloat16).to(float32_place.device).requires_grad_()
    residual = random(3, 16, seed=2).float().to(float32_place.device).requires_grad_()
    weight = random(16, seed=3).to(torch.bfloat16).to(float32_place.device).requires_grad_()
    y, s = add_rms_norm(x, residual, weight)
    assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)
    (y.float().sum() + s.sum()).backward()
    assert (x.grad.dtype, residual.grad.dtype) == (torch.bfloat16, torch.float32)
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, residual, weight)]
    want_y, want_s = formulas.add_rms_norm(*exact)
    (want_y.sum() + want_s.sum()).backward()
    torch.testing.assert_close(s.double().cpu(), want_s, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y.double().cpu(), want_y, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(residual.grad.double().cpu(), exact[1].grad, rtol=1e-4, atol=1e-4)


def test_a_float64_residual(place) -> None:
    """The sum with a float64 residual is computed in float64, for every dtype of x."""
    x = random(3, 16, seed=1).to(place.device, place.dtype)
    residual = random(3, 16, seed=2).to(place.device).requires_grad_()
    weight = torch.ones(16, device=place.device)
    y, s = add_rms_norm(x, residual, weight)
    assert (y.dtype, s.dtype) == (place.dtype, torch.float64)
    assert torch.equal(s, x.double() + residual)
    (y.double().sum() + s.sum()).backward()
    exact = residual.detach().requires_grad_()
    want_y, want_s = formulas.add_rms_norm(x.double(), exact, weight.double())
    (want_y.sum() + want_s.sum()).backward()
    torch.testing.assert_close(residual.grad, exact.grad, rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match=r"expected \(4,\)"):
        rms_norm(x, torch.ones(3))
    with pytest.raises(ValueError, match="casting_mode='hf'"):
        rms_norm(x, weight, casting_mode="hf")
    with pytest.raises(ValueError, match="differ in shape"):
        add_rms_norm(x, torch.ones(1, 4), weight)
    for wrong in (weight.long(), weight.to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match=rf"rms_norm: weight is {wrong.dtype}; expected a fl"):
            rms_norm(x, wrong)
    with pytest.raises(ValueError, match=r"add_rms_norm: residual is torch\.int64"):
        add_rms_norm(x, x.long(), weight)
    with pytest.raises(ValueError, match="0-dimensional"):
        rms_norm(torch.tensor(1.0), torch.tensor(1.0))
