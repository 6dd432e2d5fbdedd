"""Frozen linears with 8-bit or 4-bit weights, for models that train adapters or serve as reference.

The weight is converted back for each product, in forward and again in backward. Nothing of its
full size is kept. Weights in float8 are multiplied as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.float8.convert import check_device
from ligermodels.float8.linear import obstacle
from ligermodels.kernels.dequantize import NF4, dequantize
from ligermodels.kernels.dispatch import autocast_dtype, cast
from ligermodels.kernels.float8_cast import (
    Float8,
    absolute_maximum,
    float8_cast,
    float8_product,
    formats,
)
from ligermodels.kernels.frozen_experts import ExpertWeight

FLOAT8: Literal["float8"] = "float8"
Bits = int | Literal["float8"]
BITS = (4, 8, FLOAT8)
BLOCK = 64  # neighbouring 4-bit values of a row that share a scale
_ROWS = 4096  # so many rows are converted at once


class QuantizedLinear(nn.Module):
    """A frozen linear with weights of few bits; its bias is not converted.

    With 8 bits, each row of the weight has a scale and values from -127 to 127. With 4 bits, each
    block of 64 values of a row has a scale, and each value is one of the 16 of NormalFloat4
    (arXiv:2305.14314): 4.25 bits for each weight. With "float8", the weight is in e4m3 with one
    scale, and the products run in float8 (see `ligermodels.float8`).

    Args:
        linear: the layer to convert. Its weight may be on another device.
        bits: 4, 8 or "float8".
        device: where the new layer belongs; by default, where the weight is.

    Attributes:
        codes: (out, in) int8 or float8, or (out, in / 2) uint8; see `kernels.dequantize`.
        scales: (out, 1), (out, in / 64) bfloat16, or for float8 (1, 1) float32.
    """

    codes: Tensor
    scales: Tensor
    levels: Tensor | None
    bias: Tensor | None

    @torch.no_grad()
    def __init__(
        self, linear: nn.Linear, bits: Bits = 4, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if bits not in BITS:
            raise ConfigError(f"QuantizedLinear: bits={bits!r}; expected 4, 8 or 'float8'")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits = bits
        if bits == 4 and self.in_features % 2:
            raise ConfigError(
                f"QuantizedLinear: in_features={self.in_features} is odd; 4-bit values come in "
                "pairs, so use 8 bits for this layer"
            )
        weight = linear.weight.detach()
        device, dtype = device or weight.device, weight.dtype
        if bits == FLOAT8:
            check_device(torch.device(device))
            if (reason := obstacle(linear)) is not None:
                raise ConfigError(f"QuantizedLinear: bits='float8': {reason}")
        rows = weight.split(_ROWS)
        levels = torch.tensor(NF4, device=device) if bits == 4 else None
        if bits == FLOAT8:
            made = [_to_float8(weight.to(device), formats()[0])]
        elif levels is None:
            made = [_to_8_bits(part.to(device)) for part in rows]
        else:
            made = [_to_4_bits(part.to(device), levels) for part in rows]
        self.register_buffer("codes", torch.cat([codes for codes, _ in made]))
        scales = torch.cat([scales for _, scales in made])
        self.register_buffer("scales", scales.to(dtype) if bits == 8 else scales)
        self.register_buffer("levels", levels, persistent=False)
        bias = linear.bias
        self.register_buffer("bias", None if bias is None else bias.detach().to(device, dtype))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in)."""
        if self.levels is None:
            return (self.codes.float() * self.scales.float()).to(dtype)
        return dequantize(self.codes, self.scales, self.levels, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (..., out) for x (..., in), in the dtype of x or of autocast."""
        x = cast(x, autocast_dtype(x) or x.dtype)
        kind = _Float8Linear if self.bits == FLOAT8 else _FrozenLinear
        out: Tensor = kind.apply(x, self.codes, self.scales, self.levels)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def expert_weight(self) -> ExpertWeight:
        """Return the weight of experts, whose rows are those of this layer."""
        return ExpertWeight(self.codes, self.scales, self.levels)

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


class _FrozenLinear(torch.autograd.Function):
    """Multiply by a quantised weight. Backward converts it again instead of keeping the result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, levels: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, levels)
        if levels is not None:
            return F.linear(x, dequantize(codes, scales, levels, x.dtype))
        # bfloat16 holds every whole number up to 256, so the conversion rounds nothing.
        return F.linear(x, codes.to(x.dtype)) * scales[:, 0].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales, levels = ctx.saved_tensors
        if levels is not None:
            return grad @ dequantize(codes, scales, levels, grad.dtype), None, None, None
        scaled = grad * scales[:, 0].to(grad.dtype)
        return scaled @ codes.to(grad.dtype), None, None, None


class _Float8Linear(torch.autograd.Function):
    """Multiply in float8, forward and backward. The scales come from the operands themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, levels: None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        straight = Float8(*_to_float8(x.flatten(0, -2), codes.dtype))
        out = float8_product(straight, Float8(codes, scales), x.dtype, fast=True)
        # An adapter adds to it in place, which autograd forbids for a view.
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], len(codes)))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        straight = Float8(*_to_float8(grad.flatten(0, -2), formats()[1]))
        # With this scale, which is 1, nothing is rounded. PyTorch transposes bytes slowly.
        one = scales.new_full((1, 1), torch.finfo(codes.dtype).max)
        _, turned = float8_cast(codes, one, codes.dtype, straight=False, transposed=True)
        assert turned is not None
        dx = float8_product(straight, Float8(turned.values, scales), grad.dtype)
        return dx.view(*grad.shape[:-1], codes.shape[1]), None, None, None


def _to_float8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in float8, and its only scale (1, 1) in float32."""
    x = x.contiguous()
    straight, _ = float8_cast(x, absolute_maximum(x), dtype)
    assert straight is not None
    return straight.values, straight.scale


def _to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values (rows, in) and float32 scales (rows, 1)."""
    exact = weight.float()
    scale = exact.abs().amax(1, keepdim=True) / 127
    codes = (exact / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return codes.to(torch.int8), scale


def _to_4_bits(weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of two values each (rows, in / 2), and bfloat16 scales (rows, in / 64)."""
    rows, width = weight.shape
    block = min(BLOCK, width & -width)  # a power of 2 that divides the width
    exact = weight.float().view(rows, width // block, block)
    scales = exact.abs().amax(2).to(torch.bfloat16)
    tiny = torch.finfo(torch.float32).tiny
    between = (levels[1:] + levels[:-1]) / 2
    values = (exact / scales.float().clamp(min=tiny)[:, :, None]).view(rows, width)
    nearest = torch.bucketize(values, between, out_int32=True).to(torch.uint8)
    low, high = nearest.chunk(2, 1)
    return low | high << 4, scales
