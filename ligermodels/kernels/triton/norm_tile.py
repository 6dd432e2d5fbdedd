"""What RMSNorm and LayerNorm read of a tile of rows.

EVICTION, a policy of tl.load, has no default: Triton 3.6 does not take strings there.
"""

import triton
import triton.language as tl


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
    """s, grad_y and, unless its pointer is None, grad_s as they are stored; zeros outside."""
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
    """A number of each row."""
    return tl.load(statistic_ptr + row, mask=row < rows, other=0.0)


@triton.jit
def _parameter(parameter_ptr, column, columns, EVICTION: tl.constexpr):
    """Weight or bias in float32."""
    loaded = tl.load(
        parameter_ptr + column, mask=column < columns, other=0.0, eviction_policy=EVICTION
    )
    return loaded.to(tl.float32)
