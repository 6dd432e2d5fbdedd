"""Plain PyTorch: the largest absolute value, and the cast to float8."""

import torch
from torch import Tensor

SMALLEST = 1e-30  # the least amax that a scale is made from; its inverse is a float32
MULTIPLE = 16  # the lengths of rows in products of float8 are multiples of it


def absolute_maximum(x: Tensor, axis: str) -> Tensor:
    """Return (1, 1), (rows, 1) or (1, columns) in float32, for x (rows, columns)."""
    shape = {"tensor": (1, 1), "rows": (len(x), 1), "columns": (1, x.shape[1])}[axis]
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    over = {"tensor": (0, 1), "rows": (1,), "columns": (0,)}[axis]
    return x.abs().amax(over, keepdim=True).float()


def recorded(x: Tensor, amax: Tensor | None) -> Tensor:
    """Return x; if amax is given, write the largest absolute value of x into it."""
    if amax is not None:
        amax.copy_(absolute_maximum(x.flatten(0, -2), "tensor"))
    return x


def float8_cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, straight: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return x / scale, its transpose, and scale = amax / the largest number of the dtype.

    Micikevicius et al. 2022, arXiv:2209.05433, section 4.

    Args: amax: of the shapes that `absolute_maximum` returns.
    Returns: (rows, columns) and (columns, rows up to a multiple of 16), each None if it was not
        asked for, and the scale in the shape of amax.
    """
    largest = torch.finfo(dtype).max
    amax = amax.clamp(min=SMALLEST)
    most = torch.full_like(amax, largest)  # a number would be divided with two roundings
    values = (x.float() * (most / amax)).clamp(-largest, largest).to(dtype)
    turned = None
    if transposed:
        rows = -(-len(x) // MULTIPLE) * MULTIPLE
        turned = torch.zeros(x.shape[1], rows, dtype=dtype, device=x.device)
        turned[:, : len(x)] = values.t()
    return values if straight else None, turned, amax / most
