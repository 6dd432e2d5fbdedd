"""Products of each row with its expert's frozen weight of few bits, and with a thin weight.

The tiles of a weight are on the left of the products, so that what a program computes from codes
stays in registers, and the tiles of the results are transposed.
"""

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, launch
from ligermodels.kernels.triton.dequantize import dequantize_forward
from ligermodels.kernels.triton.expert_mlp import (
    _launch_linear,
    _options,
    _padded,
    _pairs_of_expert,
    _pairs_of_slots,
    _tile_of_expert,
    _tiles,
    expert_linear,
)

# A tile has `rows` rows of x and `block` rows of the weight. The tables are by the bytes of an
# element of x.
QUANTIZED = Launches(
    nvidia=((2, Launch(128, 8, 3, rows=128, depth=32)), (None, Launch(64, 4, rows=32, depth=32))),
    amd=((2, Launch(64, 4, rows=64, depth=32)), (None, Launch(32, 4, rows=32, depth=32))),
)
# For few rows. A program is one warp, so that the levels of 4 bits stay in its registers.
QUANTIZED_FEW = Launches(
    nvidia=((2, Launch(16, 1, 3, rows=16, depth=64)), (None, Launch(16, 1, rows=16, depth=32))),
    amd=((2, Launch(16, 1, rows=16, depth=64)), (None, Launch(16, 1, rows=16, depth=32))),
)
ADD = Launches(
    nvidia=((2, Launch(128, 4, 2, rows=128, depth=32)), (None, Launch(64, 4, rows=64, depth=16))),
    amd=((2, Launch(64, 4, rows=64, depth=16)), (None, Launch(64, 4, rows=32, depth=16))),
)
# With more rows for each expert, on average, a weight of 8 or of 4 bits is converted once and
# multiplied then, as it is in backward. On an H100, gate and up of Qwen3-30B-A3B took 0.36 ms with
# 8 bits in tiles and 4 to 128 rows for each expert, and 0.71 to 0.76 ms after a conversion. With
# fewer rows than experts, a conversion also reads experts that no row has chosen.
ROWS_IN_TILE = 128, 1


@triton.jit
def _quantized_product(
    x_ptr,
    row,
    codes_ptr,
    scales_ptr,
    levels_ptr,
    weight_row,
    width,
    block_size,
    blocks,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return W x^T of a tile, float32: (BLOCK rows of W, ROWS rows of x).

    levels_ptr is None for 8 bits. W has `width` codes in a row. With 4 bits a code has a column of
    the first half of W's in its low bits, and one of the second half in its high bits. RUN: the
    neighbouring codes that are known to have one scale.
    """
    HALVES: tl.constexpr = 1 if levels_ptr is None else 2
    out = tl.zeros((BLOCK, ROWS), tl.float32)
    x_row = x_ptr + (row * width * HALVES)[None, :]
    code_row = codes_ptr + (weight_row * width)[:, None]
    scale_row = scales_ptr + (weight_row * blocks)[:, None]
    if levels_ptr is not None:
        levels = tl.load(levels_ptr + tl.arange(0, 16))
    for start in range(0, width, DEPTH):
        at, run = start + tl.arange(0, DEPTH), start + tl.arange(0, DEPTH // RUN) * RUN
        inside = at < width
        codes = tl.load(code_row + at[None, :], mask=inside[None, :], other=0)
        for half in tl.static_range(HALVES):
            if levels_ptr is None:
                values = codes.to(tl.float32)
            else:
                # Loads would pass through shared memory one by one, to be ahead of the product.
                code = (codes.to(tl.int32) >> (4 * half)) & 15
                values = tl.gather(levels, code.reshape(BLOCK * DEPTH), 0)
            scale_at = scale_row + ((run + half * width) // block_size)[None, :]
            scales = tl.load(scale_at, mask=(run < width)[None, :], other=0.0).to(tl.float32)
            values = values.reshape(BLOCK, DEPTH // RUN, RUN) * scales[:, :, None]
            x_at = x_row + (at + half * width)[:, None]
            x = tl.load(x_at, mask=inside[:, None], other=0.0)
            values = values.reshape(BLOCK, DEPTH).to(x.dtype)
            out = tl.dot(values, x, out, input_precision="ieee")
    return out


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
    RUN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program handles a tile of an expert's rows and a block of its weight's `features`."""
    tiles = tl.cdiv(features, BLOCK)
    tile = tl.program_id(0) // tiles
    expert, first, end = _tile_of_expert(starts_ptr, tile, experts, ROWS, EXPERTS)
    if expert < experts:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        own = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        # Rows and features outside read some inside, which is faster than a mask.
        out = _quantized_product(
            *(x_ptr, tl.minimum(row, end - 1), codes_ptr, scales_ptr, levels_ptr),
            *(expert.to(tl.int64) * features + own % features, width, block_size, blocks),
            *(RUN, ROWS, BLOCK, DEPTH),
        )
        mask = (row < end)[None, :] & (own < features)[:, None]
        at = row[None, :] * features + own[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantized_expert_linear_few_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    levels_ptr,
    experts_ptr,
    out_ptr,
    pairs,
    top_k,
    experts,
    features,
    width,
    block_size,
    blocks,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program handles all pairs of one expert, as in `expert_linear_few_kernel`."""
    tiles = tl.cdiv(features, BLOCK)
    first = tl.program_id(0) // tiles
    own = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    expert, count, number = _pairs_of_expert(experts_ptr, first, pairs, experts, PAIRS)
    for done in range(0, count, ROWS):
        slot = done + tl.arange(0, ROWS)
        row = _pairs_of_slots(number, slot, PAIRS)
        out = _quantized_product(
            *(x_ptr, row // top_k, codes_ptr, scales_ptr, levels_ptr),
            *(expert * features + own % features, width, block_size, blocks),
            *(RUN, ROWS, BLOCK, DEPTH),
        )
        mask = (slot < count)[None, :] & (own < features)[:, None]
        at = row[None, :] * features + own[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    if transposed and len(x) <= ROWS_IN_TILE[levels is not None] * experts:
        x, codes, scales = x.contiguous(), codes.contiguous(), scales.contiguous()
        features = len(codes) // experts
        out = x.new_empty(len(x), features)
        if len(x):
            setting = launch(QUANTIZED, x.element_size())
            quantized_expert_linear_kernel[_tiles(len(x), experts, features, setting)](
                *(x, codes, scales, levels, starts, out, experts, features),
                *_blocks(codes, scales, levels),
                EXPERTS=_padded(experts),
                **_options(setting),
            )
        return out
    weight = dequantize_forward(codes, scales, levels, x.dtype)
    stack = weight.unflatten(0, (experts, -1))
    return expert_linear(x, stack.mT if transposed else stack, starts)


def quantized_expert_linear_few(
    x: Tensor, codes: Tensor, scales: Tensor, levels: Tensor | None, experts: Tensor, count: int
) -> Tensor:
    """Launch the kernel for `reference.quantized_expert_linear_few`."""
    x, codes, scales = x.contiguous(), codes.contiguous(), scales.contiguous()
    pairs, features = experts.numel(), len(codes) // count
    out = x.new_empty(pairs, features)
    if pairs:
        setting = launch(QUANTIZED_FEW, x.element_size())
        quantized_expert_linear_few_kernel[(pairs * cdiv(features, setting.block),)](
            *(x, codes, scales, levels, experts.contiguous(), out),
            *(pairs, pairs // len(x), count, features),
            *_blocks(codes, scales, levels),
            PAIRS=_padded(pairs),
            **_options(setting),
        )
    return out


def _blocks(codes: Tensor, scales: Tensor, levels: Tensor | None) -> tuple[int, int, int, int]:
    """Return the codes of a row, the size of a block of columns, their number, and RUN."""
    width, blocks = codes.shape[1], scales.shape[1]
    if levels is None:
        return width, width, 1, 16
    size = 2 * width // blocks  # a power of 2, of which the half divides the width
    return width, size, blocks, min(16, size // 2)
