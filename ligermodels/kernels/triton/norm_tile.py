"""Shared parts of the norms' kernels: loads of a tile of rows, limits, and sums of columns.

EVICTION is the eviction policy of tl.load. It has no default, because Triton 3.6 does not allow a
string as a default.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, Table, cdiv, keywords, launch

MAX_WIDTH = 65536

# On AMD, the registers hold only one tile in backward, so more programs hide the latency.
AMD_BACKWARD: Table = (
    (1024, Launch(0, 2, 1, programs=4)),
    (4096, Launch(0, 8, 1, programs=4)),
    (None, Launch(0, 16, 1, programs=4)),
)
AMD_FORWARD: Table = (
    (1024, Launch(0, 2)),
    (4096, Launch(0, 4)),
    (8192, Launch(0, 8)),
    (None, Launch(0, 16)),
)


def check_width(op: str, columns: int) -> None:
    """Raise ValueError if rows are too long for the norm kernels."""
    if columns > MAX_WIDTH:
        raise ValueError(
            f"{op}: rows of {columns} elements are too long; the kernel keeps a whole row in "
            f"registers and supports at most {MAX_WIDTH} elements"
        )


@triton.jit
def _tile(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    row,
    rows,
    column,
    columns,
    EVICTION: tl.constexpr,
):
    """Load s, grad_y and, unless its pointer is None, grad_s; elements outside are zero."""
    mask = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    s = tl.load(s_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION)
    grad = tl.load(grad_y_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION)
    grad_s = grad
    if grad_s_ptr is not None:
        grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
    return s, grad, grad_s


@triton.jit
def _statistic(statistic_ptr, row, rows):
    """Load one number for each row."""
    return tl.load(statistic_ptr + row, mask=row < rows, other=0.0)


@triton.jit
def _parameter(parameter_ptr, column, columns, EVICTION: tl.constexpr):
    """Load a weight or bias as float32."""
    loaded = tl.load(
        parameter_ptr + column, mask=column < columns, other=0.0, eviction_policy=EVICTION
    )
    return loaded.to(tl.float32)


COLUMN_SUMS = Launches(
    nvidia=((None, Launch(16, 4, rows=64)),),
    amd=((None, Launch(32, 4, rows=64)),),
)


@triton.jit
def column_sums_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program handles one block of columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < columns)
        total += tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    out = tl.sum(total, 0, keep_dims=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, out, mask=column < columns)


def column_sums(x: Tensor, dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """Sum the rows of x (rows, columns), float32 and contiguous, and round each sum once.

    The columns are those of several gradients, one after the other, one for each dtype. This is one
    launch; `x.sum(0).to(dtype)` would take two for each gradient. The order of addition is fixed.
    """
    if not dtypes:
        return ()
    rows, columns = x.shape
    dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.float32
    out = x.new_empty(columns, dtype=dtype)
    if columns:
        setting = launch(COLUMN_SUMS, columns)
        column_sums_kernel[(cdiv(columns, setting.block),)](
            x,
            out,
            rows,
            columns,
            ROWS=setting.rows,
            **keywords(setting),
        )
    if len(dtypes) == 1:
        return (out,)
    return tuple(part.to(dtype) for part, dtype in zip(out.chunk(len(dtypes)), dtypes))
