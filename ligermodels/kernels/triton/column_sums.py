"""Sums of the columns of float32 rows, which the kernels' programs have left."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch

COLUMN_SUMS = Launches(nvidia=Launch(16, 4, rows=64), amd=Launch(32, 4, rows=64))


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
            x, out, rows, columns, ROWS=setting.rows, **keywords(setting)
        )
    if len(dtypes) == 1:
        return (out,)
    return tuple(part.to(dtype) for part, dtype in zip(out.chunk(len(dtypes)), dtypes))
