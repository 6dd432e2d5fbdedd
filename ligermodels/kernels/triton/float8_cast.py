"""The cast to float8 in one or both orientations."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch
from ligermodels.kernels.reference.float8_cast import BLOCK, MULTIPLE, SMALLEST, Cast
from ligermodels.kernels.triton.float8_tile import _record_amax, _scaled, _store_turned, _tile_of

CAST = Launches(nvidia=Launch(512, 4, rows=16), amd=Launch(1024, 4, rows=8))
# A tile is a block with one scale, or its rows are blocks, or its columns.
BLOCKS = Launches(nvidia=Launch(BLOCK, 8, rows=BLOCK), amd=Launch(BLOCK, 8, rows=BLOCK))
BLOCKS_TURNED = Launches(nvidia=Launch(64, 4, rows=BLOCK), amd=Launch(64, 8, rows=BLOCK))
# The transpose goes through shared memory.
TRANSPOSE = Launches(nvidia=Launch(64, 4, rows=64), amd=Launch(64, 4, rows=64))


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
    """Each program handles one tile. values, turned and seen may be None.

    AXIS says what has a scale. If amax is None, a tile has the whole of it.
    """
    row, column = _tile_of(columns, ROWS, BLOCK)
    across, down = tl.cdiv(columns, BLOCK), tl.cdiv(rows, ROWS)
    block, tile = tl.program_id(0) % across, tl.program_id(0) // across
    inside = column < columns
    mask = (row < rows) & inside
    if amax_ptr is not None:
        if AXIS == "tensor":
            amax = tl.load(amax_ptr)
            at, stored = 0, tl.program_id(0) == 0
        elif AXIS == "rows":
            amax = tl.load(amax_ptr + row, mask=row < rows, other=0.0)
            at, stored = row, (block == 0) & (row < rows)
        else:
            amax = tl.load(amax_ptr + column, mask=inside, other=0.0)
            at, stored = column, (tile == 0) & inside
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    if x.dtype.primitive_bitwidth == 8:
        x = x.to(tl.bfloat16)  # exact; see `_store_turned`
    if seen_ptr is not None:
        _record_amax(seen_ptr, x)
    if amax_ptr is None:
        most = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)  # see `_record_amax`
        if AXIS != "columns":
            most = tl.max(most, 1, keep_dims=True)
        if AXIS != "rows":
            most = tl.max(most, 0, keep_dims=True)
        amax = most.to(tl.float32, bitcast=True)
        mask = (row < padded) & inside
        if AXIS == "tensor":
            at = block.to(tl.int64) * down + tile if values_ptr is None else tl.program_id(0)
            at, stored = at + tl.zeros_like(most), most >= 0
        elif AXIS == "rows":
            at, stored = block.to(tl.int64) * padded + row, row < padded
        else:
            at, stored = tile.to(tl.int64) * columns + column, inside
    scaled, scale = _scaled(x, amax, smallest, largest)
    if values_ptr is not None:
        values = scaled.to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * columns + column, values, mask=mask)
    if turned_ptr is not None:
        amax = amax if AXIS == "tensor" else tl.trans(amax)
        _store_turned(turned_ptr, x, amax, row, column, columns, padded, smallest, largest)
    tl.store(scale_ptr + at, scale, mask=stored)


def float8_cast(
    x: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
    square: bool,
    straight: bool,
    transposed: bool,
    seen: Tensor | None = None,
) -> tuple[Cast | None, Cast | None]:
    """Launch the kernel for `reference.float8_cast`."""
    x = x.contiguous()
    rows, columns = x.shape
    padded = cdiv(rows, MULTIPLE) * MULTIPLE
    if straight and transposed and amax is None:
        # One launch for both took longer than two: each of its tiles has 128 x 128 elements.
        first, _ = float8_cast(x, None, dtype, square, True, False, seen)
        return first, float8_cast(x, None, dtype, square, False, True)[1]
    if transposed and x.element_size() > 2:
        # Triton 3.6 transposes a tile of float32 on its way to float8 wrongly on Hopper.
        first = float8_cast(x, amax, dtype, square, True, False, seen)[0] if straight else None
        x_t = F.pad(x.t(), (0, padded - rows))
        amax_t, seen = None if amax is None else amax.t().contiguous(), None if straight else seen
        return first, float8_cast(x_t, amax_t, dtype, square, True, False, seen)[0]
    values = turned = None
    if straight:
        values = x.new_empty((padded if amax is None else rows, columns), dtype=dtype)
    if transposed:
        turned = x.new_empty((columns, padded), dtype=dtype)
    if amax is not None:
        scale = torch.empty_like(amax)
        axis = "tensor" if amax.numel() == 1 else "rows" if amax.shape[0] > 1 else "columns"
        launches = TRANSPOSE if transposed else CAST
    else:
        across, down = cdiv(columns, BLOCK), cdiv(rows, BLOCK)
        shape = (across, padded) if straight else (down, columns)
        if square:
            shape = (down, across) if straight else (across, down)
        scale = x.new_empty(shape, dtype=torch.float32)
        axis = "tensor" if square else "rows" if straight else "columns"
        launches = BLOCKS_TURNED if axis == "columns" else BLOCKS
    if x.numel():
        setting = launch(launches, columns)
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
    else:
        scale.fill_(SMALLEST)
    if amax is None and not square:
        scale = scale.t()
    turned_scale = scale if amax is None else scale.t()
    return (
        None if values is None else (values, scale),
        None if turned is None else (turned, turned_scale),
    )
