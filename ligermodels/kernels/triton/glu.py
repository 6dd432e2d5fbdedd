"""act(gate) * up of packed rows, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch, reusable
from ligermodels.kernels.reference.float8_cast import BLOCK as FLOAT8_BLOCK
from ligermodels.kernels.reference.float8_cast import SMALLEST
from ligermodels.kernels.triton.float8_tile import _record_amax, _scaled, _store_turned, _tile_of

# HIP counts the threads of a launch in 32 bits. On AMD, eight elements for each lane make that
# enough for 2^35 elements.
GLU = Launches(nvidia=Launch(512, 2), amd=Launch(2048, 4))
DIRECT = Launches(nvidia=Launch(1024, 2), amd=GLU.amd)  # the output is float8
# Where a float8 gate_up is written or read, the columns of a tile have one scale.
KEPT = Launches(nvidia=Launch(FLOAT8_BLOCK, 4, rows=16), amd=Launch(FLOAT8_BLOCK, 4, rows=32))
TURNED = Launches(nvidia=Launch(64, 4, rows=32), amd=Launch(64, 8, rows=64))


@triton.jit
def _gate(x, ACTIVATION: tl.constexpr):
    """Return phi(x) and its derivative. The activation is x * phi(x)."""
    if ACTIVATION == "silu":
        phi = tl.sigmoid(x)
        slope = phi * (1 - phi)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
        phi = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = phi * (1 - phi) * (1.5957691216057308 * (1 + 0.134145 * x * x))
    else:
        phi = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return phi, slope


@triton.jit
def _gradients(gate, up, grad, ACTIVATION: tl.constexpr):
    """Return the gradients of gate and up, and the output, all in float32."""
    phi, slope = _gate(gate, ACTIVATION)
    activation = gate * phi
    return grad * up * (phi + gate * slope), grad * activation, activation * up


@triton.jit
def _scale_at(row, rows, width, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the scales of the tile's gates are, and how far behind those of up are."""
    block = tl.program_id(0) % tl.cdiv(width, BLOCK) * BLOCK // COLUMNS
    rows = tl.cast(rows, tl.int64)
    return block * rows + row, tl.cdiv(width, COLUMNS) * rows


@triton.jit
def _gate_and_up(
    gate_up_ptr,
    scale_ptr,
    row,
    column,
    mask,
    rows,
    width,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load a tile in float32. scale may be None unless gate_up is in float8."""
    at = row * 2 * width + column
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        at_scale, behind = _scale_at(row, rows, width, COLUMNS, BLOCK)
        gate *= tl.load(scale_ptr + at_scale, mask=row < rows, other=0.0)
        up *= tl.load(scale_ptr + at_scale + behind, mask=row < rows, other=0.0)
    return gate, up


@triton.jit
def glu_forward_kernel(
    gate_up_ptr,
    out_ptr,
    amax_ptr,
    limit_ptr,
    kept_ptr,
    scale_ptr,
    rows,
    width,
    smallest,
    largest,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one tile.

    amax may be None, and so may limit unless out is in float8. If kept and scale are given,
    gate_up is written there in float8; then the columns of a tile have one scale.
    """
    row, column = _tile_of(width, ROWS, BLOCK)
    mask = (row < rows) & (column < width)
    gate, up = _gate_and_up(gate_up_ptr, None, row, column, mask, rows, width, COLUMNS, BLOCK)
    phi, _ = _gate(gate, ACTIVATION)
    out = (gate * phi * up).to(gate_up_ptr.dtype.element_ty)
    if amax_ptr is not None:
        _record_amax(amax_ptr, out)
    if limit_ptr is not None:
        out, _ = _scaled(out, tl.load(limit_ptr), smallest, largest)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)
    if kept_ptr is not None:
        at = row * 2 * width + column
        at_scale, behind = _scale_at(row, rows, width, COLUMNS, BLOCK)
        for part in tl.static_range(2):
            x = up if part else gate
            most = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1, keep_dims=True)
            values, scale = _scaled(x, most.to(tl.float32, bitcast=True), smallest, largest)
            values = values.to(kept_ptr.dtype.element_ty)
            tl.store(kept_ptr + at + part * width, values, mask=mask)
            tl.store(scale_ptr + at_scale + part * behind, scale, mask=row < rows)


@triton.jit
def glu_backward_kernel(
    gate_up_ptr,
    scale_ptr,
    grad_output_ptr,
    grad_gate_up_ptr,
    out_ptr,
    amax_ptr,
    turned_ptr,
    out_amax_ptr,
    straight_ptr,
    across_ptr,
    limit_ptr,
    rows,
    width,
    padded,
    smallest,
    largest,
    grad_largest,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one tile. What may be None is not wanted.

    The gradient goes to grad_gate_up, or in float8 to straight and, transposed, to across. amax
    gets its largest absolute value. The output that is computed again goes to out, or transposed
    and in float8 to turned.

    A program reads its elements before it writes any, so grad_gate_up may be gate_up and out may be
    grad_output.
    """
    row, column = _tile_of(width, ROWS, BLOCK)
    mask = (row < rows) & (column < width)
    at = row * 2 * width + column
    gate, up = _gate_and_up(gate_up_ptr, scale_ptr, row, column, mask, rows, width, COLUMNS, BLOCK)
    grad = tl.load(grad_output_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    grad_gate, grad_up, out = _gradients(gate, up, grad, ACTIVATION)
    dtype = grad_gate_up_ptr.dtype.element_ty
    grad_gate, grad_up, out = grad_gate.to(dtype), grad_up.to(dtype), out.to(dtype)
    if straight_ptr is None:
        tl.store(grad_gate_up_ptr + at, grad_gate, mask=mask)
        tl.store(grad_gate_up_ptr + at + width, grad_up, mask=mask)
    else:
        limit = tl.load(limit_ptr)
        half = tl.cast(width, tl.int64) * padded
        for part in tl.static_range(2):
            grad_part = grad_up if part else grad_gate
            values, _ = _scaled(grad_part, limit, smallest, grad_largest)
            values = values.to(straight_ptr.dtype.element_ty)
            tl.store(straight_ptr + at + part * width, values, mask=mask)
            to_ptr = across_ptr + part * half
            _store_turned(
                to_ptr, grad_part, limit, row, column, width, padded, smallest, grad_largest
            )
    if amax_ptr is not None:
        _record_amax(amax_ptr, grad_gate)
        _record_amax(amax_ptr, grad_up)
    if out_ptr is not None:
        tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)
    if turned_ptr is not None:
        out_amax = tl.load(out_amax_ptr)
        _store_turned(turned_ptr, out, out_amax, row, column, width, padded, smallest, largest)


def glu_forward(
    gate_up: Tensor,
    activation: str,
    amax: Tensor | None = None,
    direct: tuple[torch.dtype, Tensor] | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Launch the kernel for `reference.glu_forward`."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    dtype, limit = direct or (gate_up.dtype, None)
    out = gate_up.new_empty((*gate_up.shape[:-1], width), dtype=dtype)
    if out.numel() == 0:
        return out
    values, scale = kept or (None, None)
    largest = direct[0] if direct else None if values is None else values.dtype
    launches = KEPT if kept is not None else DIRECT if direct else GLU
    rows, setting = out.numel() // width, launch(launches, width)
    glu_forward_kernel[(cdiv(rows, setting.rows) * cdiv(width, setting.block),)](
        gate_up,
        out,
        None if amax is None else amax.view(torch.int32),
        limit,
        values,
        scale,
        rows,
        width,
        SMALLEST,
        0.0 if largest is None else torch.finfo(largest).max,
        ACTIVATION=activation,
        COLUMNS=FLOAT8_BLOCK,
        ROWS=setting.rows,
        **keywords(setting),
    )
    return out


def glu_backward(
    gate_up: Tensor,
    grad_output: Tensor,
    activation: str,
    recompute_output: bool,
    overwrite: bool,
    amax: Tensor | None = None,
    turned: tuple[Tensor, Tensor] | None = None,
    operand: tuple[Tensor, ...] | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel for `reference.glu_backward`."""
    gate_up, grad_output = gate_up.contiguous(), grad_output.contiguous()
    width = grad_output.shape[-1]
    if overwrite and scale is None:
        grad_gate_up = gate_up
    elif operand is None:
        grad_gate_up = gate_up.new_empty(
            gate_up.shape, dtype=gate_up.dtype if scale is None else grad_output.dtype
        )
    else:
        grad_gate_up = grad_output.new_empty(1).expand(gate_up.shape)
    out = reusable(grad_output) if recompute_output else None
    if grad_output.numel() == 0:
        return grad_gate_up, out
    values, out_amax = turned or (None, None)
    straight, across, limit, amax = operand or (None, None, None, amax)
    launches = TURNED if turned is not None else KEPT if scale is not None else GLU
    rows, setting = grad_output.numel() // width, launch(launches, width)
    glu_backward_kernel[(cdiv(rows, setting.rows) * cdiv(width, setting.block),)](
        gate_up,
        scale,
        grad_output,
        grad_gate_up,
        out,
        None if amax is None else amax.view(torch.int32),
        values,
        out_amax,
        straight,
        across,
        limit,
        rows,
        width,
        0 if values is None else values.shape[1],
        SMALLEST,
        0.0 if values is None else torch.finfo(values.dtype).max,
        0.0 if straight is None else torch.finfo(straight.dtype).max,
        ACTIVATION=activation,
        COLUMNS=FLOAT8_BLOCK,
        ROWS=setting.rows,
        **keywords(setting),
    )
    return grad_gate_up, out
