"""Parts of kernels that write float8 or record what its scale is made from."""

import torch
import triton
import triton.language as tl

# On NVIDIA the conversion itself turns what is too large into the largest number.
SATURATES: tl.constexpr = tl.constexpr(
    torch.version.hip is None and not triton.knobs.runtime.interpret
)


@triton.jit
def _record_amax(amax_ptr, x):
    """Raise the number at amax_ptr, the bits of a float32 in an int32, to the largest |x|.

    The bits of positive floats have the order of the floats, and those of a NaN come last.
    """
    most = tl.max(tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))
    # Most programs find a larger number there, and need not wait for each other.
    known = tl.load(amax_ptr, cache_modifier=".cg")
    tl.atomic_max(amax_ptr, most, mask=most > known, sem="relaxed")


@triton.jit
def _tile_of(columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows and columns of the program's tile. Neighbours share their rows."""
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column


@triton.jit
def _scaled(x, amax, smallest, largest):
    """Return x / scale in float32, which becomes at most the largest number, and the scale.

    An infinity becomes NaN.
    """
    # torch.compile passes Python floats as float64.
    smallest, largest = tl.cast(smallest, tl.float32), tl.cast(largest, tl.float32)
    amax = tl.maximum(amax, smallest, propagate_nan=tl.PropagateNan.ALL)
    x = x.to(tl.float32)
    zero = x * 0  # or NaN for an infinity, which must not saturate
    x *= tl.div_rn(largest, amax)
    if not SATURATES:
        x = tl.maximum(x, -largest, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, largest, propagate_nan=tl.PropagateNan.ALL)
    return x + zero, tl.div_rn(amax, largest)


@triton.jit
def _store_turned(turned_ptr, x, amax, row, column, columns, padded, smallest, largest):
    """Store the transpose of a tile in float8, in rows of `padded` elements.

    The tile is transposed in its dtype, of 16 bits: Triton 3.6 transposes some tiles of float8
    wrongly on Hopper.
    """
    turned, _ = _scaled(tl.trans(x), amax, smallest, largest)
    turned = turned.to(turned_ptr.dtype.element_ty)
    row, column = tl.trans(row), tl.trans(column)
    mask = (column < columns) & (row < padded)
    tl.store(turned_ptr + column.to(tl.int64) * padded + row, turned, mask=mask)
