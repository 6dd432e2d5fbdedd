"""Products of each row with its expert's frozen weight of few bits, and with a thin weight.

The tiles of a weight are on the left of the products, so that what a program computes from codes
stays in registers, and the tiles of the results are transposed.
"""

from math import gcd
from struct import pack

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dequantize import NF4
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
    expert_linear_few,
)

# A tile has `rows` rows of x and `block` rows of the weight. The tables are by the bytes of an
# element of x.
QUANTIZED = Launches(
    nvidia=((2, Launch(128, 8, 3, rows=128, depth=32)), (None, Launch(32, 4, rows=32, depth=32))),
    amd=((2, Launch(64, 4, rows=64, depth=32)), (None, Launch(32, 4, rows=32, depth=32))),
)
# For few rows. Where a program is one warp, the levels of 4 bits are in its registers; programs of
# more warps look them up as `_lookup` says.
QUANTIZED_FEW = Launches(
    nvidia=((2, Launch(64, 4, 4, rows=8, depth=64)), (None, Launch(16, 1, rows=16, depth=32))),
    amd=((2, Launch(16, 1, rows=16, depth=64)), (None, Launch(16, 1, rows=16, depth=32))),
)
ADD = Launches(
    nvidia=((2, Launch(128, 4, 2, rows=128, depth=32)), (None, Launch(64, 4, rows=64, depth=16))),
    amd=((2, Launch(64, 4, rows=64, depth=16)), (None, Launch(64, 4, rows=32, depth=16))),
)
# With more rows for each expert, on average, a weight of 8 bits is converted once and multiplied
# then, as one of 4 bits and every weight in backward are. On an H200, gate and up of Qwen3-30B-A3B
# took 0.31 ms with 8 bits in tiles and 128 rows for each expert, and 0.57 ms after a conversion;
# with 256 rows 0.59 and 0.63. With few rows, a conversion also reads experts that none has chosen.
ROWS_IN_TILE = 256


def _lookup(kind: str) -> str:
    """Return PTX that makes four bytes, of two codes each, two levels in 16 bits for each byte.

    The levels are those of NF4. The high and the low bytes of the 16 are in four words each. `prmt`
    picks four bytes from two words by the low 3 bits of four codes, and by their highest bit the
    right ones are kept of two such picks. On an H200 gate and up of gpt-oss-20b took 36 us for one
    token and 184 us for 16; with levels in the registers of one warp 51 and 229 us.

    Args: kind: "e" for float16, "f" for bfloat16, of which float32 is twice as long.
    """
    shift = 16 if kind == "f" else 0  # to nearest: no level lies between two
    bits = [
        (int.from_bytes(pack("<" + kind, x), "little") + (shift << 11) >> shift) & 0xFFFF
        for x in NF4
    ]
    words = [
        sum((bits[first + i] >> byte & 255) << 8 * i for i in range(4))
        for byte in (0, 8)
        for first in (0, 4, 8, 12)
    ]
    text = """{.reg .b32 pick, high, keep, a, b, c, d;
        and.b32 pick, $4, 0x77777777; shr.u32 high, $4, 3; and.b32 high, high, 0x11111111;"""
    for half in (0, 1):
        text += "prmt.b32 keep, 0xff00, 0, high;"
        for name, word in zip("abcd", range(0, 8, 2)):
            text += f"prmt.b32 {name}, {words[word]}, {words[word + 1]}, pick;"
        text += f"""lop3.b32 a, keep, b, a, 0xCA; lop3.b32 c, keep, d, c, 0xCA;
            prmt.b32 ${2 * half}, a, c, 0x5140; prmt.b32 ${2 * half + 1}, a, c, 0x7362;
            shr.u32 pick, pick, 16; shr.u32 high, high, 16;"""
    return text + "}"


LOOKUPS = {torch.bfloat16: _lookup("f"), torch.float16: _lookup("e")}


@triton.jit
def _quantized_product(
    x_ptr,
    row,
    codes_ptr,
    scales_ptr,
    levels_ptr,
    weight_row,
    width,
    blocks,
    SIZE: tl.constexpr,
    LOOKUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return W x^T of a tile, float32: (BLOCK rows of W, ROWS rows of x).

    levels_ptr is None for 8 bits. W has `width` codes in a row. With 4 bits a code has a column of
    the first half of W's in its low bits, and one of the second half in its high bits. DEPTH
    divides `width` and SIZE, the columns that have one scale, so that sums are scaled and not
    their parts.
    """
    HALVES: tl.constexpr = 1 if levels_ptr is None else 2
    out = tl.zeros((BLOCK, ROWS), tl.float32)
    x_row = x_ptr + (row * width * HALVES)[None, :]
    code_row = codes_ptr + (weight_row * width)[:, None]
    scale_row = scales_ptr + weight_row * blocks
    if levels_ptr is not None and LOOKUP is None:
        levels = tl.load(levels_ptr + tl.arange(0, 16))
    for start in range(0, width, DEPTH):
        at = start + tl.arange(0, DEPTH)
        codes = tl.load(code_row + at[None, :])
        if LOOKUP is not None:
            both = tl.inline_asm_elementwise(LOOKUP, "=r,=r,=r,=r,r", [codes], tl.int32, True, 4)
        for half in tl.static_range(HALVES):
            x = tl.load(x_row + (at + half * width)[:, None])
            if levels_ptr is None:
                out = tl.dot(codes.to(x.dtype), x, out, input_precision="ieee")
            else:
                if LOOKUP is not None:
                    values = (both >> (16 * half)).to(tl.int16).to(x.dtype, bitcast=True)
                else:
                    code = (codes.to(tl.int32) >> (4 * half)) & 15
                    values = tl.gather(levels, code.reshape(BLOCK * DEPTH), 0).to(x.dtype)
                    values = values.reshape(BLOCK, DEPTH)
                part = tl.dot(values, x, input_precision="ieee")
                scale = tl.load(scale_row + (start + half * width) // SIZE).to(tl.float32)
                out += part * scale[:, None]
    if levels_ptr is None:
        out *= tl.load(scale_row).to(tl.float32)[:, None]
    return out


@triton.jit
def quantized_expert_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    starts_ptr,
    out_ptr,
    experts,
    features,
    width,
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
            *(x_ptr, tl.minimum(row, end - 1), codes_ptr, scales_ptr, None),
            *(expert.to(tl.int64) * features + own % features, width, 1),
            *(None, None, ROWS, BLOCK, DEPTH),
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
    blocks,
    SIZE: tl.constexpr,
    LOOKUP: tl.constexpr,
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
            *(expert * features + own % features, width, blocks),
            *(SIZE, LOOKUP, ROWS, BLOCK, DEPTH),
        )
        mask = (slot < count)[None, :] & (own < features)[:, None]
        at = row[None, :] * features + own[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def expert_linear_add(out: Tensor, x: Tensor, weight: Tensor, starts: Tensor) -> None:
    """Launch the kernel for `reference.expert_linear_add`."""
    setting = launch(ADD, x.element_size())
    _launch_linear(x.contiguous(), weight, starts, out, setting, add=True)


def quantized_expert_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    starts: Tensor,
    transposed: bool,
) -> Tensor:
    """Launch the kernels for `reference.quantized_expert_linear`."""
    experts, rows = len(starts) - 1, len(x)
    setting = _dividing(launch(QUANTIZED, x.element_size()), codes.shape[1])
    if not transposed or levels is not None or rows > ROWS_IN_TILE * experts or setting is None:
        stack = dequantize_forward(codes, scales, levels, x.dtype).unflatten(0, (experts, -1))
        return expert_linear(x, stack.mT if transposed else stack, starts)
    x, codes, scales = x.contiguous(), codes.contiguous(), scales.contiguous()
    (_, width), features = codes.shape, len(codes) // experts
    out = x.new_empty(rows, features)
    if rows:
        quantized_expert_linear_kernel[_tiles(rows, experts, features, setting)](
            *(x, codes, scales, starts, out, experts, features, width),
            EXPERTS=_padded(experts),
            **_options(setting),
        )
    return out


def quantized_expert_linear_few(
    x: Tensor, codes: Tensor, scales: Tensor, levels: Tensor | None, experts: Tensor, count: int
) -> Tensor:
    """Launch the kernel for `reference.quantized_expert_linear_few`."""
    x, codes, scales = x.contiguous(), codes.contiguous(), scales.contiguous()
    pairs, (rows, width), blocks = experts.numel(), codes.shape, scales.shape[1]
    size = 0 if levels is None else 2 * width // blocks
    setting = _dividing(launch(QUANTIZED_FEW, x.element_size()), width, size)
    if setting is None:
        stack = dequantize_forward(codes, scales, levels, x.dtype).unflatten(0, (count, -1))
        return expert_linear_few(x, stack.mT, experts)
    features = rows // count
    out = x.new_empty(pairs, features)
    if pairs:
        quantized_expert_linear_few_kernel[(pairs * cdiv(features, setting.block),)](
            *(x, codes, scales, levels, experts.contiguous(), out),
            *(pairs, pairs // len(x), count, features, width, blocks),
            SIZE=size,
            LOOKUP=LOOKUPS[x.dtype] if levels is not None and setting.num_warps > 1 else None,
            PAIRS=_padded(pairs),
            **_options(setting),
        )
    return out


def _dividing(setting: Launch, *sizes: int) -> Launch | None:
    """Return the launch with a depth that divides the sizes, or None if products need a larger."""
    depth = gcd(setting.depth, *sizes)
    return setting._replace(depth=depth) if depth >= 16 else None
