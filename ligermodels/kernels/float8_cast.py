"""Casts to float8 with exact scales, and products of the results."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import real_device, select
from ligermodels.kernels.reference.float8_cast import BLOCK


class Float8(NamedTuple):
    """A matrix in float8; it stands for values * scale."""

    values: Tensor  # (rows, columns), row-major
    # float32: (1, 1), (rows, 1), (rows, blocks of 128 columns) in the order of columns, or (blocks
    # of 128 rows, blocks of 128 columns) in the order of rows.
    scale: Tensor


def formats() -> tuple[torch.dtype, torch.dtype]:
    """Return the types with 3 and with 2 bits of mantissa: e4m3 and e5m2.

    MI300 (gfx94x) has formats without a negative zero.
    """
    if torch.version.hip and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName:
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def absolute_maximum(x: Tensor, axis: Literal["tensor", "rows", "columns"] = "tensor") -> Tensor:
    """Return the largest absolute value of a matrix, of each row or of each column, in float32.

    It is NaN if an element is, and else infinite if an element is.

    Args: x: (rows, columns).
    Returns: (1, 1), (rows, 1) for "rows", or (1, columns) for "columns".
    """
    over = {"tensor": (0, 1), "rows": (1,), "columns": (0,)}[axis]
    if not x.numel():
        return x.sum(over, keepdim=True, dtype=torch.float32)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, math.inf, over, keepdim=True, dtype=dtype).float()


def float8_cast(
    x: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    *,
    square: bool = False,
    straight: bool = True,
    transposed: bool = False,
    seen: Tensor | None = None,
) -> tuple[Float8 | None, Float8 | None]:
    """Return x and its transpose in float8.

    The scale is amax / the largest number of the dtype, so what is at most amax fits exactly. What
    is larger saturates, but an infinity becomes NaN. A scale of zeros is not 0, so they stay zeros.
    If amax is NaN or infinite, so is the scale, and every product with the result shows it.

    Without amax, each 128 elements of a row of either result have a scale, from these elements, so
    nothing saturates.

    Args: x: (rows, columns), which with amax may be in float8; amax: what `absolute_maximum`
        returns. One for each row is only for straight, one for each column only for transposed.
        None is for columns that are a multiple of 16. square: whether the blocks without amax are
        of 128 x 128, which is for weights; seen: a float32 (1, 1) that is raised to the largest
        absolute value of x.
    Returns: x (rows, columns) if straight, and its transpose if transposed, whose rows are filled
        with zeros up to a multiple of 16; else None. Without amax, x has as many rows.
    """
    ops = select("float8_cast", x)
    made = ops.float8_cast(x, amax, dtype, square, straight, transposed, seen)
    straight_x, turned = (None if part is None else Float8(*part) for part in made)
    return straight_x, turned


def float8_product(
    a: Float8, b: Float8, dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """Return a @ b^T + bias.

    Args: a: (rows, inner); b: (columns, inner), where columns and inner are multiples of 16; bias:
        (columns), of the dtype of the result; fast: whether the tensor cores add up with about 14
        bits, which Hopper's do faster.
    Returns: (rows, columns) in dtype.
    """
    if not a.values.numel() or not b.values.numel():
        out = a.scale.new_zeros(len(a.values), len(b.values), dtype=dtype)
        return out if bias is None else out + bias
    if real_device(a.values.device).type != "cuda":
        out = _dequantised(a) @ _dequantised(b).t()
        return (out if bias is None else out + bias).to(dtype)
    by_block = a.scale.shape[1] > 1
    by_row = a.scale.numel() > 1 or b.scale.numel() > 1
    # The product of rows with scales of their own comes only in bfloat16, and float32 has no bias.
    made = torch.bfloat16 if by_row else dtype
    fused = made == dtype and dtype != torch.float32 and not by_block
    out = torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        bias=bias if fused else None,
        out_dtype=made,
        use_fast_accum=fast and not by_block,
    ).to(dtype)
    return out if fused or bias is None else out + bias


def _dequantised(x: Float8) -> Tensor:
    """Return the matrix in float32."""
    scale, (rows, columns) = x.scale, x.values.shape
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(BLOCK, 0)[:rows]
    return x.values.float() * scale
