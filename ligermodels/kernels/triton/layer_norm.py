"""Residual add and LayerNorm: one launch in forward, one or two in backward.

The second launch of backward is small and sums the gradients of weight and bias.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch, num_programs
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
        (768, Launch(0, 1, rows=2)),
        (2048, Launch(0, 2)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    amd=AMD_FORWARD,
)
BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, 1, rows=4, programs=4)),
        (2048, Launch(0, 8, 1, rows=4, programs=2)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)
# Configs of the same kernel, if there is also an upstream gradient of the sum.
ADD_BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, rows=2, programs=4, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 16, rows=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)


@triton.jit
def layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    columns,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a tile of whole rows. residual, weight and bias may be None."""
    eps = tl.cast(eps, tl.float32)  # torch.compile passes Python floats as float64
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    mask = (row < rows) & inside
    at = row.to(tl.int64) * columns + column
    s = tl.load(x_ptr + at, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        # Compute the statistics from the rounded sum that is stored.
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, s, mask=mask)
    s = s.to(tl.float32)
    mean = tl.sum(s, 1, keep_dims=True) / columns
    # Two passes over the row in registers: mean(s^2) - mean^2 would lose digits by cancellation.
    centred = tl.where(mask, s - mean, 0.0)
    squares = tl.sum(centred * centred, 1, keep_dims=True) / columns
    # Correct the rounding error of the mean. In a row of equal values, s - mean would be only that.
    rest = tl.sum(centred, 1, keep_dims=True) / columns
    mean += rest
    centred = s - mean
    rstd = 1 / tl.sqrt(tl.maximum(squares - rest * rest, 0.0) + eps)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd
    if weight_ptr is not None:
        y *= _parameter(weight_ptr, column, columns, "")
    if bias_ptr is not None:
        y += _parameter(bias_ptr, column, columns, "")
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_backward_kernel(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    NEEDS_WEIGHT_GRAD: tl.constexpr,
    NEEDS_BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """Each program handles many tiles of rows and sums their part of the parameter gradients.

    grad_s and weight may be None. With PREFETCH, the program loads the next tile while it waits for
    the reductions of this one. With RELOAD, it reads the tile again after the reductions, from the
    cache, because the sums need its registers.
    """
    # With different policies, the compiler also does not merge the two reads into one.
    FIRST: tl.constexpr = "evict_last" if RELOAD else ""
    LAST: tl.constexpr = "evict_first"
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    grad_weight = tl.zeros((1, BLOCK), tl.float32)
    grad_bias = tl.zeros((1, BLOCK), tl.float32)
    if PREFETCH:
        s, grad, grad_s = _tile(grad_y_ptr, grad_s_ptr, s_ptr, row, rows, column, columns, "")
        mean, rstd = _statistic(mean_ptr, row, rows), _statistic(rstd_ptr, row, rows)
    for _first in range(program * ROWS, rows, step):
        if PREFETCH:
            next_s, next_grad, next_grad_s = _tile(
                grad_y_ptr, grad_s_ptr, s_ptr, row + step, rows, column, columns, ""
            )
            next_mean = _statistic(mean_ptr, row + step, rows)
            next_rstd = _statistic(rstd_ptr, row + step, rows)
        else:
            s, grad, _unused = _tile(grad_y_ptr, None, s_ptr, row, rows, column, columns, FIRST)
            mean, rstd = _statistic(mean_ptr, row, rows), _statistic(rstd_ptr, row, rows)
        mask = (row < rows) & inside
        at = row.to(tl.int64) * columns + column
        normed = (s.to(tl.float32) - mean) * rstd
        grad_normed = grad.to(tl.float32)
        if weight_ptr is not None:
            # Load it from the cache for each row. In registers it would spill for the longest rows.
            grad_normed *= _parameter(weight_ptr, column, columns, FIRST)
        # After the end of a row grad is zero, so both sums are correct without a mask.
        grad_mean = tl.sum(grad_normed, 1, keep_dims=True) / columns
        slope = tl.sum(grad_normed * normed, 1, keep_dims=True) / columns
        if RELOAD:
            s, grad, _unused = _tile(grad_y_ptr, None, s_ptr, row, rows, column, columns, LAST)
            normed = (s.to(tl.float32) - mean) * rstd
            grad_normed = grad.to(tl.float32)
            if weight_ptr is not None:
                grad_normed *= _parameter(weight_ptr, column, columns, "")
        if NEEDS_WEIGHT_GRAD:
            grad_weight += tl.sum(grad.to(tl.float32) * normed, 0, keep_dims=True)
        if NEEDS_BIAS_GRAD:
            grad_bias += tl.sum(grad.to(tl.float32), 0, keep_dims=True)
        grad_x = (grad_normed - grad_mean - normed * slope) * rstd
        if grad_s_ptr is not None:
            if not PREFETCH:
                # Load it after the reduction, because before it registers are scarce.
                grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
            grad_x += grad_s.to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        row += step
        if PREFETCH:
            s, grad, grad_s, mean, rstd = next_s, next_grad, next_grad_s, next_mean, next_rstd
    partial_ptr += program.to(tl.int64) * columns * (NEEDS_WEIGHT_GRAD + NEEDS_BIAS_GRAD)
    if NEEDS_WEIGHT_GRAD:
        tl.store(partial_ptr + column, grad_weight, mask=inside)
        partial_ptr += columns
    if NEEDS_BIAS_GRAD:
        tl.store(partial_ptr + column, grad_bias, mask=inside)


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.layer_norm_forward`."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    y = torch.empty_like(x)
    mean = x.new_empty(rows, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    s = x
    if residual is not None:
        residual = residual.contiguous()
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    if rows == 0:
        return y, s, mean, rstd
    check_width("layer_norm", columns)
    setting = launch(FORWARD, columns)
    layer_norm_forward_kernel[(cdiv(rows, setting.rows),)](
        x,
        residual,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        s,
        mean,
        rstd,
        rows,
        columns,
        eps,
        ROWS=setting.rows,
        **keywords(setting),
    )
    return y, s, mean, rstd


def layer_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.layer_norm_backward`."""
    grad_y = grad_y.contiguous()
    s = s.contiguous()
    if grad_s is not None:
        grad_s = grad_s.contiguous()
    columns = s.shape[-1]
    rows = s.numel() // columns if columns else 0
    grad_x = torch.empty_like(s)
    setting = launch(BACKWARD if grad_s is None else ADD_BACKWARD, columns)
    programs = num_programs(setting, rows, s.device)
    dtypes = [dtype for dtype in (weight_dtype, bias_dtype) if dtype is not None]
    partial = s.new_empty((programs, len(dtypes) * columns), dtype=torch.float32)
    if rows:
        layer_norm_backward_kernel[(programs,)](
            grad_y,
            grad_s,
            s,
            None if weight is None else weight.contiguous(),
            mean,
            rstd,
            grad_x,
            partial,
            rows,
            columns,
            NEEDS_WEIGHT_GRAD=weight_dtype is not None,
            NEEDS_BIAS_GRAD=bias_dtype is not None,
            ROWS=setting.rows,
            PREFETCH=setting.prefetch and s.element_size() <= 2,
            RELOAD=setting.reload,
            **keywords(setting),
        )
    grads = list(column_sums(partial, dtypes))
    grad_bias = None if bias_dtype is None else grads.pop()
    grad_weight = None if weight_dtype is None else grads.pop()
    return grad_x, grad_weight, grad_bias
