"""Linears of each row's expert, the backward of their activation, and sums over a token's rows.

The grid of a linear is for the worst case, in which each expert has a part of a tile of rows. A
program finds its expert from the first rows of all experts, which stay on the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.dispatch import real_device
from ligermodels.kernels.launch import (
    Launch,
    Launches,
    cdiv,
    has_large_shared_memory,
    keywords,
    launch,
)
from ligermodels.kernels.triton.glu import _gradients

# A tile has `rows` rows and `block` columns, and reads `depth` elements of the summed dimension at
# once. The tables of LINEAR are by the bytes of an element.
LINEAR = Launches(
    nvidia=((2, Launch(128, 8, 3, rows=128, depth=32)), (None, Launch(64, 4, rows=64, depth=32))),
    amd=((2, Launch(64, 4, rows=128, depth=32)), (None, Launch(32, 4, rows=64, depth=16))),
)
# For gate and up at once, each with `block` columns. The first entry needs the shared memory of an
# H100, and 16 bits.
GATE_UP = Launches(
    nvidia=(
        (0, Launch(128, 8, 4, rows=128, depth=64)),
        (2, Launch(64, 8, 3, rows=128, depth=32)),
        (None, Launch(32, 4, rows=64, depth=32)),
    ),
    amd=((2, Launch(32, 4, rows=128, depth=32)), (None, Launch(16, 4, rows=64, depth=16))),
)
NARROW = 2**22  # the elements of an expert's gate and up: see `expert_gate_up`
# For few rows. Reading the weights takes the time, so many bytes must be on their way.
LINEAR_FEW = Launches(
    nvidia=(
        (2, Launch(64, 4, 4, rows=16, depth=128)),
        (None, Launch(32, 4, 3, rows=16, depth=64)),
    ),
    amd=((2, Launch(64, 4, rows=16, depth=64)), (None, Launch(32, 4, rows=16, depth=32))),
)
ROWS = Launches(nvidia=Launch(1024, 4), amd=Launch(2048, 4))
GLU_FORWARD = Launches(nvidia=Launch(512, 2), amd=Launch(2048, 4))
GLU_BACKWARD = Launches(
    nvidia=((1024, Launch(0, 4)), (None, Launch(1024, 4))),
    amd=((1024, Launch(0, 2)), (None, Launch(1024, 2))),
)
SUM = Launches(nvidia=Launch(1024, 4), amd=Launch(2048, 4))


@triton.jit
def _tile_of_expert(starts_ptr, tile, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile of rows (at least `experts` if none), its first row and end."""
    expert = tl.arange(0, EXPERTS)
    first = tl.load(starts_ptr + expert, mask=expert < experts, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=expert < experts, other=0)
    tiles = tl.cdiv(end - first, ROWS)
    upto = tl.cumsum(tiles, 0)
    found = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = expert == found
    row = tl.sum(tl.where(mine, first + (tile - upto + tiles).to(tl.int64) * ROWS, 0), 0)
    return found, row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    row,
    column,
    depth,
    weight_depth,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return x W of a tile, float32. row, column: the offsets of the rows of x and columns of W."""
    out = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x_at = x_ptr + row[:, None] + at[None, :]
        weight_at = weight_ptr + column[None, :] + at.to(tl.int64)[:, None] * weight_depth
        if EVEN:
            x, weight = tl.load(x_at), tl.load(weight_at)
        else:
            x = tl.load(x_at, mask=at[None, :] < depth, other=0.0)
            weight = tl.load(weight_at, mask=at[:, None] < depth, other=0.0)
        out = tl.dot(x, weight, out, input_precision="ieee")
    return out


@triton.jit
def expert_linear_kernel(
    x_ptr,
    weight_ptr,
    starts_ptr,
    out_ptr,
    experts,
    width,
    depth,
    weight_expert,
    weight_depth,
    weight_column,
    EVEN: tl.constexpr,
    ADD: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program handles a tile of an expert's rows and a block of columns, which ADD adds."""
    blocks = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    expert, first, end = _tile_of_expert(starts_ptr, program // blocks, experts, ROWS, EXPERTS)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        column = program % blocks * BLOCK + tl.arange(0, BLOCK)
        # Rows and columns outside read some inside, which is faster than a mask.
        x_row = tl.minimum(row, end - 1).to(tl.int64) * depth
        weight_at = weight_ptr + expert.to(tl.int64) * weight_expert
        weight_at_column = (column % width).to(tl.int64) * weight_column
        out = _product(
            *(x_ptr, weight_at, x_row, weight_at_column, depth, weight_depth),
            *(EVEN, ROWS, BLOCK, DEPTH),
        )
        at = row[:, None].to(tl.int64) * width + column[None, :]
        mask = (row < end)[:, None] & (column < width)[None, :]
        if ADD:
            out += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _pairs_of_expert(experts_ptr, first, pairs, experts, PAIRS: tl.constexpr):
    """Return the expert of the pair `first`, how many pairs it has, and the number of each pair.

    Pairs of other experts have the number -1. If an earlier pair has the same expert, there are 0.
    """
    pair = tl.arange(0, PAIRS)
    named = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    named = tl.minimum(tl.maximum(named, 0), experts - 1)
    expert = tl.sum(tl.where(pair == first, named, 0), 0)
    own = ((named == expert) & (pair < pairs)).to(tl.int32)
    is_first = tl.sum(tl.where(pair < first, own, 0), 0) == 0
    number = tl.where(own > 0, tl.cumsum(own, 0) - 1, -1)
    return expert.to(tl.int64), tl.where(is_first, tl.sum(own, 0), 0), number


@triton.jit
def _pairs_of_slots(number, slot, PAIRS: tl.constexpr):
    """Return the pairs with the numbers `slot`; without one, pair 0, whose result is not stored."""
    pair = tl.arange(0, PAIRS)[None, :]
    return tl.sum(tl.where(number[None, :] == slot[:, None], pair, 0), 1).to(tl.int64)


@triton.jit
def expert_linear_few_kernel(
    x_ptr,
    weight_ptr,
    experts_ptr,
    out_ptr,
    pairs,
    top_k,
    experts,
    width,
    depth,
    weight_expert,
    weight_depth,
    weight_column,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program handles all pairs of one expert, and a block of columns.

    It has the number of a pair, and does nothing if an earlier pair has the same expert.
    """
    blocks = tl.cdiv(width, BLOCK)
    first = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    expert, count, number = _pairs_of_expert(experts_ptr, first, pairs, experts, PAIRS)
    weight_at = weight_ptr + expert * weight_expert
    weight_at_column = (column % width).to(tl.int64) * weight_column
    for done in range(0, count, ROWS):
        slot = done + tl.arange(0, ROWS)
        row = _pairs_of_slots(number, slot, PAIRS)
        out = _product(
            *(x_ptr, weight_at, row // top_k * depth, weight_at_column, depth, weight_depth),
            *(EVEN, ROWS, BLOCK, DEPTH),
        )
        at = row[:, None] * width + column[None, :]
        mask = (slot < count)[:, None] & (column < width)[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _block_of_row(width, BLOCK: tl.constexpr):
    """Return the program's row and columns. Neighbours in the grid are neighbours in memory."""
    program = tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK)
    row = (program // blocks).to(tl.int64)
    return row, program % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def expert_rows_kernel(x_ptr, place_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Each program copies a block of one token's row to the rows of its pairs."""
    token, column = _block_of_row(width, BLOCK)
    x = tl.load(x_ptr + token * width + column, mask=column < width, other=0.0)
    for k in tl.static_range(TOP_K):
        row = tl.load(place_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(out_ptr + row * width + column, x, mask=column < width)


@triton.jit
def expert_linear_weight_gradient_kernel(
    left_ptr,
    right_ptr,
    starts_ptr,
    out_ptr,
    height,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program handles a tile of one expert's gradient, and loops over the expert's rows."""
    blocks = tl.cdiv(width, BLOCK)
    tiles = tl.cdiv(height, ROWS).to(tl.int64) * blocks
    program = tl.program_id(0)
    expert, tile = program // tiles, program % tiles
    row = tile // blocks * ROWS + tl.arange(0, ROWS)
    column = tile % blocks * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    out = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(start, end, DEPTH):
        at = first + tl.arange(0, DEPTH)
        # A row of another expert may hold an infinity, which a zero of the left would make NaN.
        left_at = at.to(tl.int64)[:, None] * height + (row % height)[None, :]
        left = tl.load(left_ptr + left_at, mask=(at < end)[:, None], other=0.0)
        right_at = at.to(tl.int64)[:, None] * width + (column % width)[None, :]
        right = tl.load(right_ptr + right_at, mask=(at < end)[:, None], other=0.0)
        out = tl.dot(tl.trans(left), right, out, input_precision="ieee")
    at = (expert.to(tl.int64) * height + row[:, None]) * width + column[None, :]
    mask = (row < height)[:, None] & (column < width)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _biased(gate_up_ptr, bias_ptr, owner_ptr, row, column, inner):
    """Return gate and up of a block of a row in float32, with the bias if there is one."""
    mask = column < inner
    at = row * 2 * inner + column
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + inner, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        at = tl.load(owner_ptr + row).to(tl.int64) * 2 * inner + column
        gate += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + at + inner, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _activated(gate, up, grad, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the gradients of gate and up, and the output, all in float32."""
    if ACTIVATION != "clamped_swiglu":
        return _gradients(gate, up, grad, ACTIVATION)
    alpha, limit = tl.cast(alpha, tl.float32), tl.cast(limit, tl.float32)
    gate_inside, up_inside = gate <= limit, tl.abs(up) <= limit
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1
    phi = tl.sigmoid(alpha * gate)
    grad_gate = tl.where(gate_inside, grad * up * phi * (1 + alpha * gate * (1 - phi)), 0.0)
    return grad_gate, tl.where(up_inside, grad * gate * phi, 0.0), gate * phi * up


@triton.jit
def expert_gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    gate_up_ptr,
    out_ptr,
    top_k,
    experts,
    inner,
    depth,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each program handles a tile of an expert's rows, and a block of columns of gate and of up.

    It reads the rows of x where the tokens have them. bias may be None.
    """
    blocks, program = tl.cdiv(inner, BLOCK), tl.program_id(0)
    expert, first, end = _tile_of_expert(starts_ptr, program // blocks, experts, ROWS, EXPERTS)
    if expert < experts:
        row, column = first + tl.arange(0, ROWS), program % blocks * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(order_ptr + tl.minimum(row, end - 1)) // top_k
        part = tl.arange(0, 2 * BLOCK)
        own = (program % blocks * BLOCK + part % BLOCK) % inner + tl.where(part < BLOCK, 0, inner)
        weight_at = weight_ptr + expert.to(tl.int64) * 2 * inner * depth
        token_at, own_at = token.to(tl.int64) * depth, own.to(tl.int64) * depth
        both = _product(
            *(x_ptr, weight_at, token_at, own_at, depth, 1, EVEN, ROWS, 2 * BLOCK, DEPTH)
        )
        both = both.to(out_ptr.dtype.element_ty).reshape(ROWS, 2, BLOCK).permute(0, 2, 1)
        gate, up = tl.split(both)
        row_at, mask = row.to(tl.int64)[:, None] * inner, (row < end)[:, None] & (column < inner)
        tl.store(gate_up_ptr + 2 * row_at + column, gate, mask=mask)
        tl.store(gate_up_ptr + 2 * row_at + inner + column, up, mask=mask)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if bias_ptr is not None:
            bias_at = bias_ptr + expert.to(tl.int64) * 2 * inner + column
            gate += tl.load(bias_at, mask=column < inner, other=0.0).to(tl.float32)
            up += tl.load(bias_at + inner, mask=column < inner, other=0.0).to(tl.float32)
        _, _, out = _activated(gate, up, 0.0, alpha, limit, ACTIVATION)
        tl.store(out_ptr + row_at + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def expert_glu_forward_kernel(
    gate_up_ptr,
    bias_ptr,
    owner_ptr,
    out_ptr,
    inner,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a block of one row. bias may be None."""
    row, column = _block_of_row(inner, BLOCK)
    gate, up = _biased(gate_up_ptr, bias_ptr, owner_ptr, row, column, inner)
    _, _, out = _activated(gate, up, 0.0, alpha, limit, ACTIVATION)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * inner + column, out, mask=column < inner)


@triton.jit
def expert_glu_backward_kernel(
    gate_up_ptr,
    bias_ptr,
    owner_ptr,
    grad_ptr,
    weights_ptr,
    order_ptr,
    grad_gate_up_ptr,
    out_ptr,
    grad_weights_ptr,
    inner,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one row, a block after the other, so that its sum has a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + row)
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, inner, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < inner
        at = row * 2 * inner + column
        gate, up = _biased(gate_up_ptr, bias_ptr, owner_ptr, row, column, inner)
        grad = tl.load(grad_ptr + row * inner + column, mask=mask, other=0.0).to(tl.float32)
        grad_gate, grad_up, out = _activated(gate, up, grad * weight, alpha, limit, ACTIVATION)
        tl.store(grad_gate_up_ptr + at, grad_gate.to(dtype), mask=mask)
        tl.store(grad_gate_up_ptr + at + inner, grad_up.to(dtype), mask=mask)
        out = out.to(dtype).to(tl.float32)  # as forward rounded it
        tl.store(out_ptr + row * inner + column, (out * weight).to(dtype), mask=mask)
        total += grad * out
    grad_weight = tl.sum(total, 0).to(grad_weights_ptr.dtype.element_ty)
    tl.store(grad_weights_ptr + pair, grad_weight)


@triton.jit
def expert_sum_kernel(
    y_ptr,
    place_ptr,
    weights_ptr,
    bias_ptr,
    experts_ptr,
    out_ptr,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a block of one token's row. place, weights and bias may be None.

    A negative place is that of no row.
    """
    token, column = _block_of_row(width, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        if place_ptr is not None:
            row = tl.load(place_ptr + row).to(tl.int64)
        mask = (column < width) & (row >= 0)
        each = tl.load(y_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            at = tl.load(experts_ptr + token * TOP_K + k).to(tl.int64) * width + column
            each += tl.load(bias_ptr + at, mask=column < width, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            each *= tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
        total += each
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + column, out, mask=column < width)


def _torch_is_faster(x: Tensor, y: Tensor) -> bool:
    """Return whether torch's grouped product of x (rows, in) and y runs here, and is faster.

    On an H200 it reaches 470 to 740 TFLOP/s in bf16 with 8,192 tokens, and the kernel here 380 and
    425 in float16. It needs dense tensors, and rows that begin at multiples of 16 bytes. Before
    Hopper, it waits for the host.
    """
    if x.dtype != torch.bfloat16 or torch.version.hip or x.shape[1] % 8 or y.shape[-1] % 8:
        return False
    if not (y.is_contiguous() or y.mT.is_contiguous()):
        return False
    if not torch.compiler.is_compiling() and y.data_ptr() % 16:
        return False
    if not torch.cuda.is_available():  # the GPU is simulated
        return True
    return torch.cuda.get_device_properties(real_device(x.device)).major in (9, 10)


def _options(setting: Launch) -> dict[str, int]:
    """Return the options of a product's tile and its launch."""
    return {"ROWS": setting.rows, "DEPTH": setting.depth, **keywords(setting)}


def _tiles(rows: int, experts: int, width: int, setting: Launch) -> tuple[int]:
    """Return the grid: the most tiles that the rows of the experts can have, times the blocks."""
    most = cdiv(rows - min(rows, experts), setting.rows) + min(rows, experts)
    return (most * cdiv(width, setting.block),)


def _padded(experts: int) -> int:
    return 1 << (experts - 1).bit_length()


def expert_linear(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Launch the product for `reference.expert_linear`."""
    x = x.contiguous()
    if len(x) and _torch_is_faster(x, weight):
        return F.grouped_mm(x, weight, offs=starts[1:])
    out = x.new_empty(len(x), weight.shape[2])
    _launch_linear(x, weight, starts, out, launch(LINEAR, _bytes(x, weight)))
    return out


def _bytes(x: Tensor, weight: Tensor) -> int:
    """Return the key of a product's launch config: the bytes of an element."""
    # What is read one by one needs more registers; the tile of float32 leaves them.
    sizes = x.shape[1], weight.shape[2], *weight.stride()
    aligned = all(size % 16 == 0 or size == 1 for size in sizes)
    return x.element_size() if aligned else 4


def expert_gate_up(
    x: Tensor, rows: Any, weight: Tensor, starts: Tensor, bias: tuple[Any, Any], activation: Any
) -> tuple[Tensor, Tensor]:
    """Launch the kernels for `reference.expert_gate_up`.

    On an H200 in bf16, the product that gathers rows takes 0.92 of the time of copies, torch's
    product and an activation with the experts of Qwen3-30B-A3B, 0.99 with 2**22 elements of gate
    and up, and 1.09 with gpt-oss-20b's, as the rest takes a smaller share of the time. In float16,
    without torch's product, it takes 0.67 and 0.73.
    """
    (order, place), (experts, depth, width), pairs = rows, weight.shape, len(rows[0])
    torch_is_faster = depth * width > NARROW and _torch_is_faster(x, weight)
    if not pairs or torch_is_faster or not weight.mT.is_contiguous():
        gate_up = expert_linear(expert_rows(x, place), weight, starts)
        return gate_up, expert_glu_forward(gate_up, *bias, activation)
    gate_up, out = x.new_empty(pairs, width), x.new_empty(pairs, width // 2)
    size = _bytes(x, weight)
    large = size == 2 and depth % 64 == 0 and has_large_shared_memory(x.device)
    setting, numbers = launch(GATE_UP, 0 if large else size), _name_and_numbers(activation)
    expert_gate_up_kernel[_tiles(pairs, experts, width // 2, setting)](
        *(x.contiguous(), weight.mT, bias[0] if bias[0] is None else bias[0].contiguous()),
        *(order, starts, gate_up, out, place.shape[1], experts, width // 2, depth, *numbers[1:]),
        ACTIVATION=numbers[0],
        EVEN=depth % setting.depth == 0,
        EXPERTS=_padded(experts),
        **_options(setting),
    )
    return gate_up, out


def _launch_linear(
    x: Tensor, weight: Tensor, starts: Tensor, out: Tensor, setting: Launch, add: bool = False
) -> None:
    """Write x W of each row's expert, or add it to what out (rows, out) holds."""
    (rows, depth), (experts, _, width) = x.shape, weight.shape
    if rows:
        expert_linear_kernel[_tiles(rows, experts, width, setting)](
            *(x, weight, starts, out, experts, width, depth, *weight.stride()),
            EVEN=depth % setting.depth == 0,
            ADD=add,
            EXPERTS=_padded(experts),
            **_options(setting),
        )


def are_few(pairs: int, experts: int) -> bool:
    """Return whether `expert_linear_few` is faster than a sort and products of sorted rows.

    On an H100 it is, for up to 512 pairs and four for each expert: with 128 experts of Qwen3, 8 of
    them, a layer takes 38 instead of 73 us for 1 token, and 271 instead of 340 us for 16.
    """
    return 0 < pairs <= min(512, 4 * experts)


def expert_linear_few(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Launch the product for `reference.expert_linear_few`."""
    x, pairs, (count, depth, width) = x.contiguous(), experts.numel(), weight.shape
    out = x.new_empty(pairs, width)
    if pairs:
        setting = launch(LINEAR_FEW, x.element_size())
        expert_linear_few_kernel[(pairs * cdiv(width, setting.block),)](
            *(x, weight, experts.contiguous(), out, pairs, pairs // len(x), count),
            *(width, depth, *weight.stride()),
            EVEN=depth % setting.depth == 0,
            PAIRS=_padded(pairs),
            **_options(setting),
        )
    return out


def expert_rows(x: Tensor, place: Tensor) -> Tensor:
    """Launch the kernel for `reference.expert_rows`."""
    x, (tokens, top_k), width = x.contiguous(), place.shape, x.shape[1]
    out = x.new_empty(tokens * top_k, width)
    if tokens:
        setting = launch(ROWS, width)
        expert_rows_kernel[(tokens * cdiv(width, setting.block),)](
            x, place, out, width, TOP_K=top_k, **keywords(setting)
        )
    return out


def expert_sum(
    y: Tensor,
    place: Tensor | None,
    weights: Tensor | None,
    bias: Tensor | None,
    experts: Tensor | None,
) -> Tensor:
    """Launch the kernel for `reference.expert_sum`."""
    of_pairs = weights if place is None else place
    assert of_pairs is not None
    (tokens, top_k), width = of_pairs.shape, y.shape[1]
    out = y.new_empty(tokens, width)
    if tokens:
        setting = launch(SUM, width)
        expert_sum_kernel[(tokens * cdiv(width, setting.block),)](
            y,
            place,
            weights if weights is None else weights.contiguous(),
            bias if bias is None else bias.contiguous(),
            experts,
            out,
            width,
            TOP_K=top_k,
            **keywords(setting),
        )
    return out


def expert_linear_weight_gradient(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """Launch the product for `reference.expert_linear_weight_gradient`."""
    left, right = left.contiguous(), right.contiguous()
    experts, height, width = len(starts) - 1, left.shape[1], right.shape[1]
    if len(left) and _torch_is_faster(left, right):
        return F.grouped_mm(left.mT, right, offs=starts[1:])
    out = left.new_empty(experts, height, width)
    setting = launch(LINEAR, left.element_size())
    tiles = cdiv(height, setting.rows) * cdiv(width, setting.block)
    expert_linear_weight_gradient_kernel[(experts * tiles,)](
        left, right, starts, out, height, width, **_options(setting)
    )
    return out


def _name_and_numbers(activation: str | ClampedSwiGLU) -> tuple[str, float, float]:
    """Return the activation's name in the kernels, and its alpha and limit if it has them."""
    if isinstance(activation, ClampedSwiGLU):
        return "clamped_swiglu", *activation
    return activation, 0.0, 0.0


def expert_glu_forward(
    gate_up: Tensor, bias: Tensor | None, owner: Tensor | None, activation: str | ClampedSwiGLU
) -> Tensor:
    """Launch the kernel for `reference.expert_glu_forward`."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    if rows:
        setting, (name, alpha, limit) = launch(GLU_FORWARD, inner), _name_and_numbers(activation)
        expert_glu_forward_kernel[(rows * cdiv(inner, setting.block),)](
            gate_up,
            bias if bias is None else bias.contiguous(),
            owner,
            out,
            inner,
            alpha,
            limit,
            ACTIVATION=name,
            **keywords(setting),
        )
    return out


def expert_glu_backward(
    gate_up: Tensor,
    bias: Tensor | None,
    owner: Tensor | None,
    grad_output: Tensor,
    weights: Tensor,
    order: Tensor,
    activation: str | ClampedSwiGLU,
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.expert_glu_backward`."""
    rows, inner = grad_output.shape
    grad_gate_up = gate_up if overwrite else torch.empty_like(gate_up)
    out = grad_output if overwrite else torch.empty_like(grad_output)
    grad_weights = weights.new_empty(weights.shape)
    if rows:
        setting, (name, alpha, limit) = launch(GLU_BACKWARD, inner), _name_and_numbers(activation)
        expert_glu_backward_kernel[(rows,)](
            gate_up,
            bias if bias is None else bias.contiguous(),
            owner,
            grad_output,
            weights.contiguous(),
            order,
            grad_gate_up,
            out,
            grad_weights,
            inner,
            alpha,
            limit,
            ACTIVATION=name,
            **keywords(setting),
        )
    return grad_gate_up, out, grad_weights
