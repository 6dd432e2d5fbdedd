"""Residual add and RMSNorm: one launch in forward, one or two in backward.

The second launch of backward is small and sums the gradient of the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.launch import (
    Launch,
    Launches,
    Table,
    cdiv,
    keywords,
    launch,
    num_programs,
    reusable,
)
from ligermodels.kernels.reference.float8_cast import SMALLEST
from ligermodels.kernels.triton.float8_tile import _record_amax, _scaled
from ligermodels.kernels.triton.norm_tile import (
    AMD_BACKWARD,
    AMD_FORWARD,
    _parameter,
    _statistic,
    _tile,
    check_width,
    column_sums,
)

FORWARD = Launches(
    nvidia=(
        (768, Launch(0, 2, rows=2)),
        (2048, Launch(0, 2)),
        (4096, Launch(0, 8)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    amd=AMD_FORWARD,
)
_LONGER: Table = (
    (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
    (4096, Launch(0, 8, programs=2, prefetch=True)),
    (8192, Launch(0, 16, prefetch=True)),
    (None, Launch(0, 16, 1, reload=True)),
)
BACKWARD = Launches(
    nvidia=((1024, Launch(0, 4, rows=4, programs=3, prefetch=True)), *_LONGER), amd=AMD_BACKWARD
)
# Configs of the same kernel, if there is also an upstream gradient of the sum.
ADD_BACKWARD = Launches(
    nvidia=((1024, Launch(0, 4, rows=2, programs=4, prefetch=True)), *_LONGER), amd=AMD_BACKWARD
)


@triton.jit
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    amax_ptr,
    limit_ptr,
    rows,
    columns,
    eps,
    offset,
    smallest,
    largest,
    LLAMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a tile of whole rows.

    The residual and amax may be None, and so may limit unless y is in float8.
    """
    # torch.compile passes Python floats as float64.
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    s = tl.load(x_ptr + at, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        # Compute the statistics from the rounded sum that is stored.
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, s, mask=mask)
    s_float = s.to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(s_float * s_float, 1, keep_dims=True) / columns + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    normed = s_float * rstd
    if LLAMA:
        normed = normed.to(s.dtype).to(tl.float32)
    weight = _parameter(weight_ptr, column, columns, "") + offset
    y = normed * weight
    if limit_ptr is not None:
        y = y.to(s.dtype)
        _record_amax(amax_ptr, y)
        y, _ = _scaled(y, tl.load(limit_ptr), smallest, largest)
        y = y.to(y_ptr.dtype.element_ty)
    else:
        y = y.to(y_ptr.dtype.element_ty)
        if amax_ptr is not None:
            _record_amax(amax_ptr, y)
    tl.store(y_ptr + at, y, mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    weight_ptr,
    rstd_ptr,
    grad_x_ptr,
    y_ptr,
    partial_ptr,
    rows,
    columns,
    offset,
    LLAMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """Each program handles many tiles of rows and sums their part of the weight gradient.

    The input grad_s and the outputs y and partial may be None. With PREFETCH, the program loads the
    next tile while it waits for the reduction of this one. With RELOAD, it reads the tile again
    after the reduction, from the cache, because the sums need its registers.

    A program reads its rows before it writes them, so y may be grad_y.
    """
    offset = tl.cast(offset, tl.float32)  # torch.compile passes Python floats as float64
    # With different policies, the compiler also does not merge the two reads into one.
    FIRST: tl.constexpr = "evict_last" if RELOAD else ""
    LAST: tl.constexpr = "evict_first"
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    grad_weight = tl.zeros((1, BLOCK), tl.float32)
    if PREFETCH:
        s, grad, grad_s = _tile(grad_y_ptr, grad_s_ptr, s_ptr, row, rows, column, columns, "")
        rstd = _statistic(rstd_ptr, row, rows)
    for _first in range(program * ROWS, rows, step):
        if PREFETCH:
            next_s, next_grad, next_grad_s = _tile(
                grad_y_ptr, grad_s_ptr, s_ptr, row + step, rows, column, columns, ""
            )
            next_rstd = _statistic(rstd_ptr, row + step, rows)
        else:
            s, grad, _unused = _tile(grad_y_ptr, None, s_ptr, row, rows, column, columns, FIRST)
            rstd = _statistic(rstd_ptr, row, rows)
        mask = (row < rows) & inside
        at = row.to(tl.int64) * columns + column
        normed = s.to(tl.float32) * rstd
        # Load it from the cache for each row. In registers it would spill for the longest rows.
        weight = _parameter(weight_ptr, column, columns, FIRST) + offset
        grad_normed = grad.to(tl.float32) * weight
        mean = tl.sum(grad_normed * normed, 1, keep_dims=True) / columns
        if RELOAD:
            s, grad, _unused = _tile(grad_y_ptr, None, s_ptr, row, rows, column, columns, LAST)
            normed = s.to(tl.float32) * rstd
            weight = _parameter(weight_ptr, column, columns, "") + offset
            grad_normed = grad.to(tl.float32) * weight
        grad_x = (grad_normed - normed * mean) * rstd
        if grad_s_ptr is not None:
            if not PREFETCH:
                # Load it after the reduction, because before it registers are scarce.
                grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
            grad_x += grad_s.to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if LLAMA:
            normed = normed.to(s.dtype).to(tl.float32)
        if partial_ptr is not None:
            grad_weight += tl.sum(grad.to(tl.float32) * normed, 0, keep_dims=True)
        if y_ptr is not None:
            tl.store(y_ptr + at, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask)
        row += step
        if PREFETCH:
            s, grad, grad_s, rstd = next_s, next_grad, next_grad_s, next_rstd
    if partial_ptr is not None:
        at = program.to(tl.int64) * columns + column
        tl.store(partial_ptr + at, grad_weight, mask=inside)


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    options: NormOptions,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.rms_norm_forward`."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    # On the host, empty_like and new_empty take half the time of torch.empty.
    y = torch.empty_like(x, dtype=out_dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    s = x
    if residual is not None:
        residual = residual.contiguous()
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    if rows == 0:
        return y, s, rstd
    check_width("rms_norm", columns)
    setting = launch(FORWARD, columns)
    rms_norm_forward_kernel[(cdiv(rows, setting.rows),)](
        x,
        residual,
        weight.contiguous(),
        y,
        s,
        rstd,
        None if amax is None else amax.view(torch.int32),
        limit,
        rows,
        columns,
        options.eps,
        options.offset,
        SMALLEST,
        0.0 if limit is None else torch.finfo(out_dtype).max,
        LLAMA=options.casting_mode == "llama",
        ROWS=setting.rows,
        **keywords(setting),
    )
    return y, s, rstd


def rms_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    options: NormOptions,
    needs_weight_grad: bool,
    recompute_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.rms_norm_backward`."""
    grad_y = grad_y.contiguous()
    s = s.contiguous()
    if grad_s is not None:
        grad_s = grad_s.contiguous()
    columns = s.shape[-1]
    rows = s.numel() // columns if columns else 0
    grad_x = torch.empty_like(s)
    y = reusable(grad_y) if recompute_y else None
    if rows == 0:
        return grad_x, torch.zeros_like(weight) if needs_weight_grad else None, y
    setting = launch(BACKWARD if grad_s is None else ADD_BACKWARD, columns)
    programs = num_programs(setting, rows, s.device)
    partial = None
    if needs_weight_grad:
        partial = s.new_empty((programs, columns), dtype=torch.float32)
    rms_norm_backward_kernel[(programs,)](
        grad_y,
        grad_s,
        s,
        weight.contiguous(),
        rstd,
        grad_x,
        y,
        partial,
        rows,
        columns,
        options.offset,
        LLAMA=options.casting_mode == "llama",
        ROWS=setting.rows,
        PREFETCH=setting.prefetch and s.element_size() <= 2,
        RELOAD=setting.reload,
        **keywords(setting),
    )
    grad_weight = None
    if partial is not None:
        (grad_weight,) = column_sums(partial, [weight.dtype])
    return grad_x, grad_weight, y
