"""The largest absolute value, and the cast to float8 in one or both orientations."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch
from ligermodels.kernels.reference.float8_cast import BLOCK, MULTIPLE, SMALLEST
from ligermodels.kernels.triton.float8_tile import (
    _record_amax,
    _scaled,
    _store_turned,
    _tile_of,
)

AMAX = Launches(nvidia=((None, Launch(512, 8, rows=16)),), amd=((None, Launch(512, 4, rows=16)),))
AMAX_OF_COLUMNS = Launches(
    nvidia=((None, Launch(64, 8, rows=256)),), amd=((None, Launch(128, 8, rows=64)),)
)
CAST = Launches(nvidia=((None, Launch(1024, 8, rows=8)),), amd=((None, Launch(1024, 4, rows=8)),))
# A tile is a block with one scale, or its rows are blocks, or its columns.
BLOCKS = Launches(
    nvidia=((None, Launch(BLOCK, 8, rows=BLOCK)),), amd=((None, Launch(BLOCK, 8, rows=BLOCK)),)
)
BLOCKS_TURNED = Launches(
    nvidia=((None, Launch(64, 4, rows=BLOCK)),), amd=((None, Launch(64, 8, rows=BLOCK)),)
)
# The transpose goes through shared memory.
TRANSPOSE = Launches(
    nvidia=((None, Launch(64, 8, rows=128)),), amd=((None, Launch(64, 4, rows=64)),)
)


@triton.jit
def absolute_maximum_kernel(
    x_ptr, amax_ptr, rows, columns, AXIS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program handles one tile. amax has int32 zeros; see `_record_amax`."""
    row, column = _tile_of(columns, ROWS, BLOCK)
    mask = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    if AXIS == "tensor":
        _record_amax(amax_ptr, x)
    elif AXIS == "rows":
        most = tl.max(bits, 1, keep_dims=True)
        tl.atomic_max(amax_ptr + row, most, mask=row < rows, sem="relaxed")
    else:
        most = tl.max(bits, 0, keep_dims=True)
        known = tl.load(amax_ptr + column, mask=column < columns, cache_modifier=".cg")
        tl.atomic_max(
            amax_ptr + column, most, mask=(column < columns) & (most > known), sem="relaxed"
        )


@triton.jit
def float8_cast_kernel(
    x_ptr,
    amax_ptr,
    values_ptr,
    turned_ptr,
    scale_ptr,
    seen_ptr,
    rows,
    columns,
    padded,
    smallest,
    largest,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one tile. values, turned and seen may be None."""
    row, column = _tile_of(columns, ROWS, BLOCK)
    inside = column < columns
    mask = (row < rows) & inside
    first = tl.program_id(0) == 0
    if AXIS == "tensor":
        amax = tl.load(amax_ptr)
    elif AXIS == "rows":
        first = tl.program_id(0) % tl.cdiv(columns, BLOCK) == 0
        amax = tl.load(amax_ptr + row, mask=row < rows, other=0.0)
    else:
        first = tl.program_id(0) < tl.cdiv(columns, BLOCK)
        amax = tl.load(amax_ptr + column, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    if seen_ptr is not None:
        _record_amax(seen_ptr, x)
    scaled, scale = _scaled(x, amax, smallest, largest)
    if values_ptr is not None:
        values = scaled.to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * columns + column, values, mask=mask)
    if turned_ptr is not None:
        amax_t = amax if AXIS == "tensor" else tl.trans(amax)
        _store_turned(turned_ptr, x, amax_t, row, column, columns, padded, smallest, largest)
    if AXIS == "tensor":
        tl.store(scale_ptr, scale, mask=first)
    elif AXIS == "rows":
        tl.store(scale_ptr + row, scale, mask=first & (row < rows))
    else:
        tl.store(scale_ptr + column, scale, mask=first & inside)


@triton.jit
def float8_cast_blocks_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    rows,
    columns,
    padded,
    smallest,
    largest,
    SQUARE: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one tile, whose rows, or columns if turned, are blocks."""
    row, column = _tile_of(columns, ROWS, BLOCK)
    across, down = tl.cdiv(columns, BLOCK), tl.cdiv(rows, ROWS)
    block, tile = tl.program_id(0) % across, tl.program_id(0) // across
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=(row < rows) & inside, other=0.0)
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)  # see `_record_amax`
    most = tl.max(bits, 0 if TURNED else 1, keep_dims=True)
    if SQUARE:
        most = tl.max(most, 1 if TURNED else 0, keep_dims=True)
    amax = most.to(tl.float32, bitcast=True)
    _, scale = _scaled(amax, amax, smallest, largest)
    if SQUARE:
        at = block * down + tile if TURNED else tile * across + block
        tl.store(scale_ptr + at + tl.zeros_like(most), scale)
    elif TURNED:
        tl.store(scale_ptr + tile.to(tl.int64) * columns + column, scale, mask=inside)
    else:
        tl.store(scale_ptr + block.to(tl.int64) * padded + row, scale, mask=row < padded)
    if TURNED:
        amax = tl.trans(amax)
        _store_turned(values_ptr, x, amax, row, column, columns, padded, smallest, largest)
    else:
        values = _scaled(x, amax, smallest, largest)[0].to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * columns + column, values, mask=(row < padded) & inside)


def absolute_maximum(x: Tensor, axis: str) -> Tensor:
    """Launch the kernel for `reference.absolute_maximum`."""
    x = x.contiguous()
    rows, columns = x.shape
    shape = {"tensor": (1, 1), "rows": (rows, 1), "columns": (1, columns)}[axis]
    amax = x.new_zeros(shape, dtype=torch.int32)
    if x.numel():
        setting = launch(AMAX_OF_COLUMNS if axis == "columns" else AMAX, columns)
        absolute_maximum_kernel[(cdiv(rows, setting.rows) * cdiv(columns, setting.block),)](
            x,
            amax,
            rows,
            columns,
            AXIS=axis,
            ROWS=setting.rows,
            **keywords(setting),
        )
    return amax.view(torch.float32)


def float8_cast(
    x: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    straight: bool,
    transposed: bool,
    seen: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Launch the kernel for `reference.float8_cast`."""
    x = x.contiguous()
    rows, columns = x.shape
    padded = cdiv(rows, MULTIPLE) * MULTIPLE
    if transposed and x.element_size() > 2:
        # Triton 3.6 transposes a tile of float32 on its way to float8 wrongly on Hopper.
        values = float8_cast(x, amax, dtype, True, False, seen)[0] if straight else None
        x_t = F.pad(x.t(), (0, padded - rows))
        turned, _, scale = float8_cast(x_t, amax.t().contiguous(), dtype, True, False)
        return values, turned, scale.t()
    values = torch.empty_like(x, dtype=dtype) if straight else None
    turned = x.new_empty((columns, padded), dtype=dtype) if transposed else None
    scale = torch.empty_like(amax)
    if x.numel() == 0:
        return values, turned, scale.fill_(SMALLEST)
    axis = "tensor"
    if amax.numel() > 1:
        axis = "rows" if amax.shape[0] > 1 else "columns"
    setting = launch(TRANSPOSE if transposed else CAST, columns)
    float8_cast_kernel[(cdiv(rows, setting.rows) * cdiv(columns, setting.block),)](
        x,
        amax,
        values,
        turned,
        scale,
        None if seen is None else seen.view(torch.int32),
        rows,
        columns,
        padded,
        SMALLEST,
        torch.finfo(dtype).max,
        AXIS=axis,
        ROWS=setting.rows,
        **keywords(setting),
    )
    return values, turned, scale


def float8_cast_blocks(
    x: Tensor, dtype: torch.dtype, square: bool, straight: bool, transposed: bool
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Launch the kernel for `reference.float8_cast_blocks`."""
    x = x.contiguous()
    rows, columns = x.shape
    padded = cdiv(rows, MULTIPLE) * MULTIPLE
    if transposed and x.element_size() > 2:  # as in `float8_cast`
        first = float8_cast_blocks(x, dtype, square, True, False)[0] if straight else None
        x_t = F.pad(x.t(), (0, padded - rows))
        return first, float8_cast_blocks(x_t, dtype, square, True, False)[0]
    made: list[tuple[Tensor, Tensor] | None] = []
    for turned, wanted in enumerate((straight, transposed)):
        if not wanted:
            made.append(None)
            continue
        # One launch for both took longer than two: each of its tiles has 128 x 128 elements.
        setting = launch(BLOCKS_TURNED if turned and not square else BLOCKS, columns)
        across, down = cdiv(columns, BLOCK), cdiv(rows, BLOCK)
        shape = (columns, padded) if turned else (padded, columns)
        blocks = ((across, down) if turned else (down, across)) if square else None
        if blocks is None:
            blocks = (down, columns) if turned else (across, padded)
        values, scale = x.new_empty(shape, dtype=dtype), x.new_empty(blocks, dtype=torch.float32)
        if x.numel():
            float8_cast_blocks_kernel[(down * cdiv(columns, setting.block),)](
                x,
                values,
                scale,
                rows,
                columns,
                padded,
                SMALLEST,
                torch.finfo(dtype).max,
                SQUARE=square,
                TURNED=bool(turned),
                ROWS=setting.rows,
                **keywords(setting),
            )
        made.append((values, scale))
    return made[0], made[1]
