"""Products of each row with its expert's frozen weight of few bits, and with a thin weight.

The tiles of a weight are on the left of the products, so that what a program computes from codes
stays in registers, and the tiles of the results are transposed.
"""

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, launch
from ligermodels.kernels.triton.dequantize import dequantize_forward
from ligermodels.kernels.triton.expert_mlp import (
    _launch_linear,
    _options,
    _padded,
    _tile_of_expert,
    _tiles,
    expert_linear,
)

# A tile has `rows` rows of x and `block` rows or columns of the weight. The tables are by the bytes
# of an element of x.
QUANTIZED = Launches(
    nvidia=((2, Launch(128, 8, 3, rows=128, depth=32)), (None, Launch(64, 4, rows=32, depth=32))),
    amd=((2, Launch(64, 4, rows=64, depth=32)), (None, Launch(32, 4, rows=32, depth=32))),
)
QUANTIZED_BACKWARD = Launches(
    nvidia=((2, Launch(64, 8, 3, rows=128, depth=32)), (None, Launch(32, 4, rows=32, depth=32))),
    amd=((2, Launch(32, 4, rows=64, depth=32)), (None, Launch(32, 4, rows=32, depth=32))),
)
ADD = Launches(
    nvidia=((2, Launch(128, 4, 2, rows=128, depth=32)), (None, Launch(64, 4, rows=64, depth=16))),
    amd=((2, Launch(64, 4, rows=64, depth=16)), (None, Launch(64, 4, rows=32, depth=16))),
)
# With more rows for each expert, on average, the weight is converted once and multiplied then: that
# of 4 bits, and of 8 bits. A value of 4 bits is looked up in a table, which takes time: on an H100,
# a layer of Qwen3-30B-A3B took 5.3 ms with 32 rows for each expert, and 4.2 ms after a conversion.
# One of 8 bits took 5.0 ms with 128 rows in tiles, where one of 16 bits took 4.5 ms.
ROWS_IN_TILE = 4, 128


@triton.jit
def _values(
    codes,
    levels_ptr,
    scales_ptr,
    row,
    column,
    first,
    block_size,
    blocks,
    HIGH: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Return the values of codes in float32; of 4 bits, those of the low or the HIGH ones.

    row, column: those of the values; UNIFORM: whether all columns from the first one on are in one
    block, with one scale.
    """
    if levels_ptr is None:
        values = codes.to(tl.float32)
    elif HIGH:
        values = tl.load(levels_ptr + (codes.to(tl.int32) >> 4))
    else:
        values = tl.load(levels_ptr + (codes.to(tl.int32) & 15))
    at = first if UNIFORM else column
    return values * tl.load(scales_ptr + row * blocks + at // block_size).to(tl.float32)


@triton.jit
def quantized_expert_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    levels_ptr,
    starts_ptr,
    out_ptr,
    experts,
    features,
    width,
    block_size,
    blocks,
    UNIFORM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x W^T. Each program handles a tile of an expert's rows and a block of features.

    levels_ptr is None for 8 bits. width: the codes of a row of the weight. With 4 bits, a code has
    a column of the first half of x and one of the second.
    """
    tiles = tl.cdiv(features, BLOCK)
    program = tl.program_id(0)
    expert, first, end = _tile_of_expert(starts_ptr, program // tiles, experts, ROWS, EXPERTS)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        feature = program % tiles * BLOCK + tl.arange(0, BLOCK)
        # Rows and features outside read some inside, which is faster than a mask.
        weight_row = (expert.to(tl.int64) * features + feature % features)[:, None]
        columns = width if levels_ptr is None else 2 * width
        x_row = x_ptr + tl.minimum(row, end - 1).to(tl.int64)[None, :] * columns
        out = tl.zeros((BLOCK, ROWS), tl.float32)
        for start in range(0, width, DEPTH):
            at = start + tl.arange(0, DEPTH)
            inside = at < width
            codes = tl.load(
                codes_ptr + weight_row * width + at[None, :], mask=inside[None, :], other=0
            )
            x = tl.load(x_row + at[:, None], mask=inside[:, None], other=0.0)
            low = tl.where(inside, at, 0)[None, :]
            values = _values(
                *(codes, levels_ptr, scales_ptr, weight_row, low, start, block_size, blocks),
                *(False, UNIFORM),
            )
            out = tl.dot(values.to(x.dtype), x, out, input_precision="ieee")
            if levels_ptr is not None:
                x = tl.load(x_row + (at + width)[:, None], mask=inside[:, None], other=0.0)
                high = tl.where(inside, at + width, 0)[None, :]
                values = _values(
                    *(codes, levels_ptr, scales_ptr, weight_row, high, start + width, block_size),
                    *(blocks, True, UNIFORM),
                )
                out = tl.dot(values.to(x.dtype), x, out, input_precision="ieee")
        at = row.to(tl.int64)[None, :] * features + feature[:, None]
        mask = (row < end)[None, :] & (feature < features)[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantized_expert_linear_backward_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    levels_ptr,
    starts_ptr,
    out_ptr,
    experts,
    features,
    width,
    block_size,
    blocks,
    UNIFORM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x W. Each program handles a tile of an expert's rows and a block of codes, as above."""
    tiles = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    expert, first, end = _tile_of_expert(starts_ptr, program // tiles, experts, ROWS, EXPERTS)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        start = program % tiles * BLOCK
        column = start + tl.arange(0, BLOCK)
        code = (column % width)[:, None]
        x_row = x_ptr + tl.minimum(row, end - 1).to(tl.int64)[None, :] * features
        weight_first = expert.to(tl.int64) * features
        low = tl.zeros((BLOCK, ROWS), tl.float32)
        high = tl.zeros((BLOCK, ROWS), tl.float32)
        for depth in range(0, features, DEPTH):
            at = depth + tl.arange(0, DEPTH)
            inside = at < features
            weight_row = (weight_first + at % features)[None, :]
            codes = tl.load(codes_ptr + weight_row * width + code)
            x = tl.load(x_row + at[:, None], mask=inside[:, None], other=0.0)
            values = _values(
                *(codes, levels_ptr, scales_ptr, weight_row, code, start, block_size, blocks),
                *(False, UNIFORM),
            )
            low = tl.dot(values.to(x.dtype), x, low, input_precision="ieee")
            if levels_ptr is not None:
                values = _values(
                    *(codes, levels_ptr, scales_ptr, weight_row, code + width, start + width),
                    *(block_size, blocks, True, UNIFORM),
                )
                high = tl.dot(values.to(x.dtype), x, high, input_precision="ieee")
        columns = width if levels_ptr is None else 2 * width
        at = row.to(tl.int64)[None, :] * columns + column[:, None]
        mask = (row < end)[None, :] & (column < width)[:, None]
        tl.store(out_ptr + at, low.to(out_ptr.dtype.element_ty), mask=mask)
        if levels_ptr is not None:
            tl.store(out_ptr + at + width, high.to(out_ptr.dtype.element_ty), mask=mask)


def expert_linear_add(out: Tensor, x: Tensor, weight: Tensor, starts: Tensor) -> None:
    """Launch the kernel for `reference.expert_linear_add`."""
    _launch_linear(x.contiguous(), weight, starts, out, ADD, add=True)


def quantized_expert_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    starts: Tensor,
    transposed: bool,
) -> Tensor:
    """Launch the kernels for `reference.quantized_expert_linear`."""
    experts = len(starts) - 1
    if len(x) <= ROWS_IN_TILE[levels is None] * experts:
        return _in_tile(x, codes, scales, levels, starts, transposed)
    weight = dequantize_forward(codes, scales, levels, x.dtype)
    stack = weight.unflatten(0, (experts, -1))
    return expert_linear(x, stack.mT if transposed else stack, starts)


def _in_tile(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    starts: Tensor,
    transposed: bool,
) -> Tensor:
    """Convert each tile of the weight in the program that multiplies it."""
    x = x.contiguous()
    experts, (weight_rows, width) = len(starts) - 1, codes.shape
    features, columns = weight_rows // experts, width * (1 if levels is None else 2)
    out = x.new_empty(len(x), features if transposed else columns)
    if len(x):
        setting = launch(QUANTIZED if transposed else QUANTIZED_BACKWARD, x.element_size())
        kernel = quantized_expert_linear_backward_kernel
        if transposed:
            kernel = quantized_expert_linear_kernel
        block_size, step = (
            columns // scales.shape[1],
            setting.depth if transposed else setting.block,
        )
        kernel[_tiles(len(x), experts, features if transposed else width, setting)](
            x,
            codes,
            scales,
            levels,
            starts,
            out,
            experts,
            features,
            width,
            block_size,
            scales.shape[1],
            UNIFORM=levels is None or (block_size % step == 0 and width % step == 0),
            EXPERTS=_padded(experts),
            **_options(setting),
        )
    return out
