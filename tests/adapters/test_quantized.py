"""Linears of 8 and 4 bits: their error, their gradient, and what they keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ligermodels.adapters import QuantizedLinear
from ligermodels.kernels.dequantize import NF4


def linear(inputs: int = 128, outputs: int = 24, **options) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, **options)


def test_4_bit_values_are_the_nearest_ones() -> None:
    exact = linear(outputs=3)
    layer = QuantizedLinear(exact, 4)
    assert layer.codes.shape == (3, 64) and layer.scales.shape == (3, 2)
    levels, blocks = torch.tensor(NF4), exact.weight.detach().view(3, 2, 64)
    scale = blocks.abs().amax(2, keepdim=True).bfloat16().float()
    distance = (blocks[..., None] - scale[..., None] * levels).abs()
    expected = levels[distance.argmin(-1)] * scale
    torch.testing.assert_close(layer.dequantized(torch.float32), expected.view(3, 128))


def test_8_bit_values_are_the_nearest_ones() -> None:
    exact = linear()
    error = (QuantizedLinear(exact, 8).dequantized(torch.float32) - exact.weight).abs()
    half_a_step = exact.weight.abs().amax(1, keepdim=True) / 127 / 2
    assert (error <= half_a_step * 1.001).all()


@pytest.mark.parametrize("bits, bias", [(4, False), (8, True)])
def test_outputs_and_gradient(bits, bias) -> None:
    exact = linear(96, bias=bias)
    with torch.no_grad():
        exact.weight[1] = 0
    layer = QuantizedLinear(exact, bits)
    assert str(layer) == f"QuantizedLinear(96, 24, bits={bits})"
    assert not layer.dequantized(torch.float32)[1].any()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 96)).dtype == torch.bfloat16
    x = torch.randn(2, 5, 96, requires_grad=True)
    out = layer(x)
    expected = nn.functional.linear(x, layer.dequantized(torch.float32), exact.bias)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    (ours,), (theirs,) = (torch.autograd.grad(y, x, grad) for y in (out, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_nothing_of_the_size_of_the_weight_is_kept(bits) -> None:
    layer = QuantizedLinear(linear(), bits)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(torch.randn(3, 128, requires_grad=True))
    own = {x.data_ptr() for x in layer.buffers()}
    assert kept and all(x.data_ptr() in own for x in kept)


def test_products_in_float8() -> None:
    exact = nn.Linear(96, 48)
    layer = QuantizedLinear(exact, "float8")
    assert layer.codes.dtype.itemsize == 1 and layer.scales.shape == (1, 1)
    x = torch.randn(2, 5, 96, requires_grad=True)
    pairs = [(layer(x), exact(x))]
    grad = torch.randn(2, 5, 48)
    pairs.append(tuple(torch.autograd.grad(y, x, grad)[0] for y in pairs[0]))
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape and (ours - theirs).norm() < 0.07 * theirs.norm()
    assert not torch.equal(*pairs[0])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="bits=3; expected 4, 8 or 'float8'"):
        QuantizedLinear(linear(), 3)
    with pytest.raises(ValueError, match="'float8': 100 to 24 are not multiples of 16"):
        QuantizedLinear(linear(100), "float8")
    with pytest.raises(ValueError, match="in_features=7 is odd"):
        QuantizedLinear(linear(7), 4)
