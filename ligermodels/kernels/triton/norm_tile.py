"""Shared parts of the RMSNorm and LayerNorm kernels: loads of a tile of rows, and limits.

EVICTION is the eviction policy of tl.load. It has no default, because Triton 3.6 does not allow a
string as a default.
"""

import triton
import triton.language as tl

from ligermodels.kernels.launch import Launch, Table

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
