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
# of 8 bits in forward, and any other. On an H100, gate and up of Qwen3-30B-A3B took 0.36 ms with 8
# bits in tiles and 4 to 128 rows for each expert, and 0.71 to 0.76 ms after a conversion; backward
# took 0.76 to 0.94 in tiles and 0.72 to 0.76. With 4 bits, whose values are looked up in a table,
# they took 1.1 and 1.4 ms in tiles, and 0.7 after a conversion; with fewer rows than experts, a
# conversion also reads experts that no row has chosen.
ROWS_IN_TILE = 128, 1


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
    TRANSPOSED: tl.constexpr,
    UNIFORM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x W^T if TRANSPOSED, or x W, for a tile of an expert's rows and a block of columns.

    levels_ptr is None for 8 bits. W has the rows `features`, and `width` codes in each. With 4 bits
    a code has a column of the first half of W's in its low bits, and one of the second half in its
    high bits; then a block of x W lies in one half. UNIFORM: whether the columns of W that a
    program reads at once are in one block, with one scale.
    """
    HALVES: tl.constexpr = 1 if levels_ptr is None else 2
    READ: tl.constexpr = HALVES if TRANSPOSED else 1  # halves that a program reads
    depth = width if TRANSPOSED else features
    tiles = tl.cdiv(features if TRANSPOSED else width, BLOCK)
    program = tl.program_id(0)
    tile = program // (tiles * (HALVES // READ))
    expert, first, end = _tile_of_expert(starts_ptr, tile, experts, ROWS, EXPERTS)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        block_start = program % tiles * BLOCK
        own = block_start + tl.arange(0, BLOCK)
        own_half = program // tiles % (HALVES // READ)
        # Rows, features and codes outside read some inside, which is faster than a mask.
        x_row = x_ptr + tl.minimum(row, end - 1).to(tl.int64)[None, :] * depth * READ
        weight_first = expert.to(tl.int64) * features
        out = tl.zeros((BLOCK, ROWS), tl.float32)
        for start in range(0, depth, DEPTH):
            at = start + tl.arange(0, DEPTH)
            inside = at < depth
            if TRANSPOSED:
                weight_row, code = (weight_first + own % features)[:, None], at[None, :]
                column, column_start = tl.where(inside, at, 0)[None, :], start
            else:
                weight_row, code = (weight_first + at % features)[None, :], (own % width)[:, None]
                column, column_start = code, block_start
            codes = tl.load(codes_ptr + weight_row * width + code, mask=inside[None, :], other=0)
            for read in tl.static_range(READ):
                half = read if TRANSPOSED else own_half
                if levels_ptr is None:
                    values = codes.to(tl.float32)
                else:
                    values = tl.load(levels_ptr + ((codes.to(tl.int32) >> (4 * half)) & 15))
                of_scale = (column_start if UNIFORM else column) + half * width
                scale_at = scales_ptr + weight_row * blocks + of_scale // block_size
                values *= tl.load(scale_at).to(tl.float32)
                x_at = x_row + (at + read * width)[:, None]
                x = tl.load(x_at, mask=inside[:, None], other=0.0)
                out = tl.dot(values.to(x.dtype), x, out, input_precision="ieee")
        most = features if TRANSPOSED else width
        out_row = row.to(tl.int64)[None, :] * most * (HALVES // READ)
        mask = (row < end)[None, :] & (own < most)[:, None]
        out_at = out_ptr + out_row + (own + own_half * most)[:, None]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    if len(x) <= ROWS_IN_TILE[levels is not None or not transposed] * experts:
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
        block_size = columns // scales.shape[1]
        step = setting.depth if transposed else setting.block
        (tiles,) = _tiles(len(x), experts, features if transposed else width, setting)
        halves = 1 if transposed or levels is None else 2
        quantized_expert_linear_kernel[(tiles * halves,)](
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
            TRANSPOSED=transposed,
            UNIFORM=levels is None or (block_size % step == 0 and width % step == 0),
            EXPERTS=_padded(experts),
            **_options(setting),
        )
    return out
