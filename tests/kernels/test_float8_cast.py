"""Casts to float8, by both implementations, against their definition in float64."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.dispatch import select
from ligermodels.kernels.float8_cast import (
    Float8,
    absolute_maximum,
    float8_cast,
    float8_product,
)
from tests.kernels.conftest import INTERPRETING, Place

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def matrix(place, rows: int, columns: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=draw) * 3
    return x.to(place.device, place.dtype)


def steps_apart(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return how many float8 numbers lie between two tensors at most; zeros have no sign."""
    codes = [(x.float() + 0.0).to(x.dtype).view(torch.uint8).int() for x in (found, expected)]
    return int((codes[0].cpu() - codes[1].cpu()).abs().max())


@pytest.mark.parametrize("rows, columns", [(5, 48), (17, 1040), (130, 96), (1, 64)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_and_transposes(place, rows, columns, dtype) -> None:
    """The interpreter rounds wrongly, so there the values are in float8, at a scale of 1."""
    x = matrix(place, rows, columns)
    largest = torch.finfo(dtype).max
    if INTERPRETING:
        x[0] = x[:, 0] = largest
        x = x.to(dtype).to(torch.bfloat16)  # the kernel transposes only 16 bits
    for axis, over in (("tensor", (0, 1)), ("rows", (1,)), ("columns", (0,))):
        amax = absolute_maximum(x, axis)
        assert torch.equal(amax, x.float().abs().amax(over, keepdim=True))
        straight, turned = float8_cast(
            x, amax, dtype, straight=axis != "columns", transposed=axis != "rows"
        )
        expected = (x.float() * (torch.full_like(amax, largest) / amax)).to(dtype)
        if straight is not None:
            assert steps_apart(straight.values, expected) == 0
            torch.testing.assert_close(straight.scale, amax / largest, rtol=1e-6, atol=0)
        if turned is not None:
            assert turned.values.shape == (columns, -(-rows // 16) * 16)
            assert steps_apart(turned.values[:, :rows].t().contiguous(), expected) == 0
            assert not turned.values[:, rows:].float().any()
            torch.testing.assert_close(turned.scale.t(), amax / largest, rtol=1e-6, atol=0)
    amax = torch.full((1, 1), largest, device=x.device)  # a scale of 1
    _, turned = float8_cast(expected, amax, dtype, straight=False, transposed=True)
    assert steps_apart(turned.values[:, :rows].t().contiguous(), expected) == 0


@pytest.mark.parametrize("rows, columns", [(5, 48), (130, 272), (512, 512)])
@pytest.mark.parametrize("square", [False, True])
def test_blocks(place, rows, columns, square) -> None:
    """Each block has the scale of its largest value; the last ones are shorter."""
    if square and rows % 16:
        return
    if place.dtype == torch.float64:
        return  # float8 linears refuse it
    x = matrix(place, rows, columns)
    if INTERPRETING:  # values in float8 at scales of powers of two, 16 bits as above
        x[::4] = x[:, ::4] = 448
        x = x.to(E4M3).to(torch.bfloat16)
    x[-1, -1] = 0
    seen = torch.zeros(1, 1, device=x.device)
    both = float8_cast(x, None, E4M3, square=square, transposed=True, seen=seen)
    assert seen == x.float().abs().max()
    padded = -(-rows // 16) * 16
    for made, exact in zip(both, (x, x.t())):
        height, width = exact.shape
        full = torch.nn.functional.pad(exact.float(), (0, -width % 128, 0, -height % 128))
        tiles = full.abs().unflatten(1, (-1, 128))
        amax = tiles.amax(2)[:height]
        if square:
            amax = tiles.unflatten(0, (-1, 128)).amax((1, 3))
        expected = (amax.clamp(min=1e-30) / 448).cpu()
        torch.testing.assert_close(made.scale[: len(expected)].cpu(), expected, rtol=1e-6, atol=0)
        scale = expected.repeat_interleave(128, 1)[:, :width]
        if square:
            scale = scale.repeat_interleave(128, 0)[:height]
        values = (exact.float().cpu() / scale).to(E4M3)
        # The values are multiplied by the inverse, which may round to the next one.
        assert steps_apart(made.values[:height, :width].contiguous(), values) <= (not INTERPRETING)
        assert made.values.shape == ((padded, columns) if exact is x else (columns, padded))
        assert not made.values[height:].float().any()
        assert not made.values[:, width:].float().any()


def test_extremes(float32_place) -> None:
    """Zeros stay zeros, values beyond amax saturate, NaN and infinity reach the scale."""
    x = matrix(float32_place, 32, 48)
    zeros = torch.zeros_like(x)
    straight, turned = float8_cast(zeros, absolute_maximum(zeros), E4M3, transposed=True)
    for made in (straight, turned):
        assert not made.values.float().any() and (made.scale > 0).all()
    straight, _ = float8_cast(x, absolute_maximum(x) / 4, E4M3)
    assert straight.values.float().abs().max() == 448
    tiny = x * 1e-35
    assert float8_cast(tiny, absolute_maximum(tiny), E4M3)[0].values.float().isfinite().all()
    for wrong in (torch.nan, torch.inf, -torch.inf):
        bad = x.clone()
        bad[7, 11] = wrong
        amax = absolute_maximum(bad)
        assert amax.isnan() if wrong != wrong else amax.isinf()
        assert not float8_cast(bad, amax, E4M3)[0].scale.isfinite()
    bad[3, 2] = torch.nan
    assert absolute_maximum(bad).isnan()


@pytest.mark.parametrize("axis", ["tensor", "rows"])
def test_product(float32_place, axis) -> None:
    """The product of the dequantised operands, with a bias, from one row and from none."""
    b_exact = matrix(float32_place, 48, 64)
    b, _ = float8_cast(b_exact, absolute_maximum(b_exact, axis), E4M3)
    bias = matrix(float32_place, 1, 48)[0]
    for rows in (0, 1, 33):
        x = matrix(float32_place, rows, 64)
        a, _ = float8_cast(x, absolute_maximum(x, axis), E4M3)
        exact = (dequantised(a) @ dequantised(b).t() + bias.double()).float()
        found = float8_product(a, b, torch.float32, bias)
        assert found.shape == (rows, 48)
        on_gpu = float32_place.device == "cuda"
        on_gpu_by_row = on_gpu and axis == "rows"
        # The values are about 70. Tensor cores add up with less than float32, and the product by
        # row comes in bfloat16.
        tolerance = 8e-3 if on_gpu_by_row else 2e-3 if on_gpu else 1e-4
        torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance * 100)


def dequantised(x: Float8) -> torch.Tensor:
    return x.values.double() * x.scale.double()


def test_what_other_kernels_record(place) -> None:
    """The largest absolute value of what they have written, rounded; NaN if there is one."""
    x, options = matrix(place, 17, 1040), NormOptions(1e-6, 0.0, "llama")
    if place.dtype == torch.float64:
        return  # float8 linears refuse it
    weight = matrix(place, 1, 1040)[0]
    glu, norm = select("glu", x), select("norms", x)
    for wrong in (None, torch.nan):
        if wrong is not None:
            x[3, 5] = wrong
        amax = [x.new_zeros(1, 1, dtype=torch.float32) for _ in range(3)]
        written = [
            glu.glu_forward(x, "silu", amax[0]),
            norm.norm_forward(x, x, weight, None, options, False, x.dtype, amax[1])[0],
            glu.glu_backward(x, matrix(place, 17, 520), "silu", True, False, amax[2])[0],
        ]
        for found, tensor in zip(amax, written):
            expected = tensor.float().abs().max().view(1, 1)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_outputs_in_float8(place) -> None:
    """The norm and the activation write what a cast of their output would have written."""
    x, options = matrix(place, 17, 1040), NormOptions(1e-6, 0.0, "llama")
    if place.dtype == torch.float64:
        return  # float8 linears refuse it
    weight = matrix(place, 1, 1040)[0]
    glu, norm = select("glu", x), select("norms", x)

    def outputs(amax: list[torch.Tensor], limit: torch.Tensor | None) -> list[torch.Tensor]:
        dtype, direct = (x.dtype, None) if limit is None else (E4M3, (E4M3, limit))
        return [
            norm.norm_forward(x, x, weight, None, options, False, dtype, amax[0], limit)[0],
            glu.glu_forward(x, "silu", amax[1], direct),
        ]

    limit = torch.full((1, 1), 5.0, device=x.device)
    seen = [torch.full((1, 1), each, device=x.device) for each in (1e3, 0.5)]
    for found, exact in zip(outputs(seen, limit), outputs([limit.clone() for _ in seen], None)):
        expected, _ = float8_cast(exact, limit, E4M3)
        if not INTERPRETING:
            assert steps_apart(found, expected.values) == 0
        assert found.dtype == E4M3 and found.float().abs().max() == 448
    assert seen[0] == 1e3 and seen[1] == exact.float().abs().max()  # raised, never lowered


@pytest.mark.parametrize("rows, width", [(17, 520), (130, 64), (64, 1040)])
def test_the_activation_written_turned(place, rows, width) -> None:
    """Backward writes the same gradient, and the output that it recomputes as a cast would."""
    gate_up, grad = matrix(place, rows, 2 * width), matrix(place, rows, width)
    if place.dtype == torch.float64 or place == Place("cuda", torch.float32):
        return  # not used: see `Float8Products.new_turned`
    ops = select("glu", gate_up)
    amax, known = (grad.new_zeros(1, 1, dtype=torch.float32) for _ in range(2))
    values = torch.full((width, -(-rows // 16) * 16), 3.0, device=grad.device).to(E4M3)
    y = ops.glu_forward(gate_up, "silu", known)
    expected, _ = ops.glu_backward(gate_up, grad.clone(), "silu", False, False)
    turned = values, known
    found, _ = ops.glu_backward(gate_up, grad, "silu", False, False, amax, turned)
    torch.testing.assert_close(found, expected)
    assert torch.equal(amax.view(()), found.float().abs().max())
    _, cast = float8_cast(y, known, E4M3, straight=False, transposed=True)
    assert not values[:, rows:].float().any()
    if not INTERPRETING:  # forward and backward may round differently by one in float32
        assert steps_apart(values, cast.values) <= (place.device == "cuda")
    # The gradient in float8, in both orientations, instead of a tensor.
    limit, seen = amax / 4, torch.zeros_like(amax)
    straight, across = float8_cast(found.flatten(0, -2), limit, E5M2, transposed=True)
    operand = [torch.full_like(each.values.float(), 3.0).to(E5M2) for each in (straight, across)]
    same, _ = ops.glu_backward(
        gate_up, grad, "silu", False, True, None, turned, (*operand, limit, seen)
    )
    assert same is gate_up and torch.equal(seen, amax)
    assert not operand[1][:, rows:].float().any()
    if not INTERPRETING:
        assert steps_apart(operand[0], straight.values) == 0
        assert steps_apart(operand[1], across.values) == 0


@pytest.mark.parametrize("rows, width", [(17, 520), (130, 64)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_up_kept_in_float8(place, rows, width, activation) -> None:
    """Forward writes it as a cast of blocks would, and backward computes from the values."""
    gate_up, grad = matrix(place, rows, 2 * width), matrix(place, rows, width)
    if place.dtype == torch.float64:
        return  # float8 linears refuse it
    ops = select("glu", gate_up)
    blocks = -(-width // 128)
    values = torch.full((rows, 2 * width), 3.0, device=grad.device).to(E4M3)
    scale = torch.full((2 * blocks, rows), 3.0, device=grad.device)
    y = ops.glu_forward(gate_up, activation, None, None, (values, scale))
    assert torch.equal(y, ops.glu_forward(gate_up, activation))
    for i, part in enumerate(gate_up.chunk(2, -1)):
        expected, _ = float8_cast(part.contiguous(), None, E4M3)
        if not INTERPRETING:  # see above
            found = values[:, i * width : (i + 1) * width].contiguous()
            assert steps_apart(found, expected.values[:rows, :width].contiguous()) == 0
        assert torch.equal(scale[i * blocks : (i + 1) * blocks].t(), expected.scale[:rows])
    factors = scale.t().unflatten(1, (2, blocks)).repeat_interleave(128, 2)[..., :width]
    exact = values.float() * factors.flatten(1)
    reference = select("glu", exact.double())
    expected = reference.glu_backward(exact.double(), grad.double(), activation, True, False)
    amax = grad.new_zeros(1, 1, dtype=torch.float32)
    found = ops.glu_backward(values, grad.clone(), activation, True, True, amax, None, None, scale)
    tolerance = 1e-2 if place.dtype == torch.bfloat16 else 1e-5  # the values are up to 100
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other.to(grad.dtype), rtol=tolerance, atol=100 * tolerance)
    assert torch.equal(amax.view(()), found[0].float().abs().max())
    if place == Place("cuda", torch.float32):
        return  # not used: see `Float8Products.new_turned`
    limits, seen = (amax * 2, amax / 4), torch.zeros_like(amax)
    _, turned = float8_cast(found[1], limits[0], E4M3, straight=False, transposed=True)
    operand = float8_cast(found[0], limits[1], E5M2, transposed=True)
    to = [torch.full_like(x.values.float(), 3.0).to(x.values.dtype) for x in (turned, *operand)]
    stands, _ = ops.glu_backward(
        *(values, grad, activation, False, True, None),
        *((to[0], limits[0]), (*to[1:], limits[1], seen), scale),
    )
    assert stands.shape == values.shape and stands.dtype == grad.dtype
    torch.testing.assert_close(seen, amax)
    for written, cast in zip(to, (turned, *operand)):
        assert INTERPRETING or steps_apart(written, cast.values) <= 1
