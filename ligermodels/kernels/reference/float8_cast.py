"""Plain PyTorch: the cast to float8."""

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-30  # the least amax that a scale is made from; its inverse is a float32
MULTIPLE = 16  # the lengths of rows in products of float8 are multiples of it
BLOCK = 128  # elements of a row, or rows and columns of a square, with one scale


def recorded(x: Tensor, amax: Tensor | None) -> Tensor:
    """Return x; if amax is given, raise it to the largest absolute value of x."""
    if amax is not None and x.numel():
        amax.copy_(torch.maximum(amax, x.abs().max().float()))
    return x


def scaled(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale in dtype, and scale = amax / the largest number of the dtype.

    Micikevicius et al. 2022, arXiv:2209.05433, section 4.
    """
    largest, x = torch.finfo(dtype).max, x.float()
    amax = amax.clamp(min=SMALLEST)
    most = torch.full_like(amax, largest)  # a number would be divided with two roundings
    # What is larger saturates, but an infinity becomes NaN.
    return ((x * (most / amax)).clamp(-largest, largest) + x * 0).to(dtype), amax / most


Cast = tuple[Tensor, Tensor]  # the fields of a `Float8`


def float8_cast(
    x: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    square: bool,
    straight: bool,
    transposed: bool,
    seen: Tensor | None = None,
) -> tuple[Cast | None, Cast | None]:
    """Return x / scale and its transpose, each with its scale, or None; see `scaled`.

    Without amax, a block is 128 elements of a row of either result, or 128 x 128 if square; the
    last ones may be shorter. DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2.

    Args: amax: of the shapes that `absolute_maximum` returns; seen: a number (1, 1) that is raised
        to the largest absolute value of x.
    Returns: (rows, columns) and (columns, rows up to a multiple of 16), or without amax (rows up to
        a multiple of 16, columns); and the scales as in `Float8`.
    """
    recorded(x, seen)
    if amax is not None:
        values, scale = scaled(x, amax, dtype)
        turned = torch.zeros(x.shape[1], len(x) + -len(x) % MULTIPLE, dtype=dtype, device=x.device)
        turned[:, : len(x)] = values.t()
        return (values, scale) if straight else None, (turned, scale.t()) if transposed else None
    made: list[Cast | None] = []
    for wanted, y in ((straight, x), (transposed, x.t())):
        if not wanted:
            made.append(None)
            continue
        y = F.pad(y, (0, -y.shape[1] % MULTIPLE, 0, -y.shape[0] % MULTIPLE))
        rows, columns = y.shape
        size = BLOCK if square else 1
        tiles = F.pad(y, (0, -columns % BLOCK, 0, -rows % size))
        tiles = tiles.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, size))
        values, scale = scaled(tiles, tiles.abs().amax((1, 3), True).float(), dtype)
        values, scale = values.flatten(0, 1).flatten(1)[:rows, :columns], scale[:, 0, :, 0]
        made.append((values.contiguous(), scale if square else scale.t().contiguous().t()))
    return made[0], made[1]
