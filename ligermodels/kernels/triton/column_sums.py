"""The end of a weight gradient: the sum of what each program of a backward has summed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.settings import launch


@triton.jit
def column_sums_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of columns a program."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < columns)
        total += tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    out = tl.sum(total, 0, keep_dims=True).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, out, mask=column < columns)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the rows of x (rows, columns), float32 and contiguous, rounded to dtype once.

    One launch, where `x.sum(0).to(dtype)` takes two; always the same order of addition.
    """
    rows, columns = x.shape
    out = torch.empty(columns, dtype=dtype, device=x.device)
    if columns:
        setting = launch("column_sums", columns)
        column_sums_kernel[(triton.cdiv(columns, setting.block),)](
            x,
            out,
            rows,
            columns,
            ROWS=setting.rows,
            BLOCK=setting.block,
            num_warps=setting.num_warps,
            num_stages=setting.num_stages,
        )
    return out
