"""Residual add and RMSNorm or LayerNorm: one launch in forward, one or two in backward.

The second launch of backward is small and sums the gradients of weight and bias.

EVICTION is the eviction policy of tl.load. It has no default, because Triton 3.6 does not allow a
string as a default.
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
from ligermodels.kernels.triton.column_sums import column_sums
from ligermodels.kernels.triton.float8_tile import _record_amax, _scaled

MAX_WIDTH = 65536

# On AMD, the registers hold only one tile in backward, so more programs hide the latency.
AMD_BACKWARD: Table = (
    (1024, Launch(0, 2, 1, programs=4)),
    (4096, Launch(0, 8, 1, programs=4)),
    (None, Launch(0, 16, 1, programs=4, reload=True)),
)
FORWARD = Launches(
    nvidia=(
        (768, Launch(0, 2, rows=2)),
        (2048, Launch(0, 2)),
        (4096, Launch(0, 8)),
        (8192, Launch(0, 4)),
        (None, Launch(0, 8)),
    ),
    amd=(
        (1024, Launch(0, 2)),
        (4096, Launch(0, 4)),
        (8192, Launch(0, 8)),
        (None, Launch(0, 16)),
    ),
)
BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, rows=2, programs=4, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 16, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)
# For a LayerNorm, with and without an upstream gradient of the sum. Of rows beyond 8,192 elements,
# eight warps hold more in registers than sixteen.
CENTRED_ADD_BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, rows=2, programs=4, prefetch=True)),
        (2048, Launch(0, 8, rows=2, programs=2, prefetch=True)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 8, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)
CENTRED_BACKWARD = Launches(
    nvidia=(
        (1024, Launch(0, 4, 1, rows=4, programs=4)),
        (2048, Launch(0, 8, 1, rows=4, programs=2)),
        (4096, Launch(0, 8, programs=2, prefetch=True)),
        (8192, Launch(0, 16, prefetch=True)),
        (None, Launch(0, 8, 1, reload=True)),
    ),
    amd=AMD_BACKWARD,
)


@triton.jit
def _tile(grad_y_ptr, s_ptr, row, rows, column, columns, EVICTION: tl.constexpr):
    """Load s and grad_y; elements outside are zero."""
    mask = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    s = tl.load(s_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION)
    grad = tl.load(grad_y_ptr + at, mask=mask, other=0.0, eviction_policy=EVICTION)
    return s, grad


@triton.jit
def _statistic(statistic_ptr, row, rows):
    """Load one number for each row, or zeros if the pointer is None."""
    statistic = tl.zeros_like(row).to(tl.float32)
    if statistic_ptr is not None:
        statistic = tl.load(statistic_ptr + row, mask=row < rows, other=0.0)
    return statistic


@triton.jit
def _parameter(parameter_ptr, column, columns, EVICTION: tl.constexpr):
    """Load a weight or bias as float32."""
    loaded = tl.load(
        parameter_ptr + column, mask=column < columns, other=0.0, eviction_policy=EVICTION
    )
    return loaded.to(tl.float32)


@triton.jit
def _normed(
    s, grad, mean, rstd, weight_ptr, mean_ptr, offset, column, columns, EVICTION: tl.constexpr
):
    """Return the normalised rows, the weight and the gradient of the normalised rows."""
    normed = s.to(tl.float32)
    if mean_ptr is not None:
        normed -= mean
    normed *= rstd
    weight = 1.0
    grad_normed = grad.to(tl.float32)
    if weight_ptr is not None:
        weight = _parameter(weight_ptr, column, columns, EVICTION)
        if mean_ptr is None:
            weight += offset
        grad_normed *= weight
    return normed, weight, grad_normed


@triton.jit
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
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
    """Each program handles a tile of whole rows: a LayerNorm if mean is given, else an RMSNorm.

    The residual, bias and amax may be None, and so may the weight of a LayerNorm, and limit unless
    y is in float8.
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
    centred = s.to(tl.float32)
    if mean_ptr is None:
        variance = tl.sum(centred * centred, 1, keep_dims=True) / columns
    else:
        whole = centred
        mean = tl.sum(whole, 1, keep_dims=True) / columns
        # Two passes over the row in registers: mean(s^2) - mean^2 would lose digits by
        # cancellation.
        centred = tl.where(mask, whole - mean, 0.0)
        squares = tl.sum(centred * centred, 1, keep_dims=True) / columns
        # Correct the rounding error of the mean. In a row of equal values, s - mean would be only
        # that.
        rest = tl.sum(centred, 1, keep_dims=True) / columns
        mean += rest
        centred = whole - mean
        variance = tl.maximum(squares - rest * rest, 0.0)
        tl.store(mean_ptr + row, mean, mask=row < rows)
    rstd = 1 / tl.sqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd
    if LLAMA:
        y = y.to(s.dtype).to(tl.float32)
    if weight_ptr is not None:
        weight = _parameter(weight_ptr, column, columns, "")
        y *= weight + offset if mean_ptr is None else weight
    if bias_ptr is not None:
        y += _parameter(bias_ptr, column, columns, "")
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
def norm_backward_kernel(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    y_ptr,
    partial_ptr,
    rows,
    columns,
    offset,
    LLAMA: tl.constexpr,
    NEEDS_WEIGHT_GRAD: tl.constexpr,
    NEEDS_BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """Each program handles many tiles of rows and sums their part of the parameters' gradients.

    grad_s and the output y may be None, and so may mean, of an RMSNorm, and the weight of a
    LayerNorm. With PREFETCH, the program loads s and grad_y of the next tile while it waits for the
    reductions of this one. With RELOAD, it reads the tile again after the reductions, from the
    cache, because the sums need its registers.

    A program reads its rows before it writes them, so y may be grad_y.
    """
    offset = tl.cast(offset, tl.float32)  # torch.compile passes Python floats as float64
    # With different policies, the compiler also does not merge the two reads into one.
    FIRST: tl.constexpr = "evict_last" if RELOAD else ""
    LAST: tl.constexpr = "evict_first"
    # Of a LayerNorm of 2,049 to 4,096 elements, two programs fit on a multiprocessor without it.
    EARLY: tl.constexpr = PREFETCH and (mean_ptr is None or BLOCK != 4096)
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    grad_weight = tl.zeros((1, BLOCK), tl.float32)
    grad_bias = tl.zeros((1, BLOCK), tl.float32)
    if PREFETCH:
        s, grad = _tile(grad_y_ptr, s_ptr, row, rows, column, columns, "")
        mean, rstd = _statistic(mean_ptr, row, rows), _statistic(rstd_ptr, row, rows)
    for _first in range(program * ROWS, rows, step):
        if PREFETCH:
            next_s, next_grad = _tile(grad_y_ptr, s_ptr, row + step, rows, column, columns, "")
            next_mean = _statistic(mean_ptr, row + step, rows)
            next_rstd = _statistic(rstd_ptr, row + step, rows)
        else:
            s, grad = _tile(grad_y_ptr, s_ptr, row, rows, column, columns, FIRST)
            mean, rstd = _statistic(mean_ptr, row, rows), _statistic(rstd_ptr, row, rows)
        mask = (row < rows) & inside
        at = row.to(tl.int64) * columns + column
        if EARLY:
            if grad_s_ptr is not None:
                grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
        # Load the weight from the cache for each row. In registers it would spill for the longest
        # rows.
        normed, weight, grad_normed = _normed(
            s, grad, mean, rstd, weight_ptr, mean_ptr, offset, column, columns, FIRST
        )
        if mean_ptr is not None:
            # After the end of a row grad is zero, so both sums are correct without a mask.
            grad_mean = tl.sum(grad_normed, 1, keep_dims=True) / columns
        slope = tl.sum(grad_normed * normed, 1, keep_dims=True) / columns
        if RELOAD:
            s, grad = _tile(grad_y_ptr, s_ptr, row, rows, column, columns, LAST)
            normed, weight, grad_normed = _normed(
                s, grad, mean, rstd, weight_ptr, mean_ptr, offset, column, columns, ""
            )
        if NEEDS_BIAS_GRAD:
            grad_bias += tl.sum(grad.to(tl.float32), 0, keep_dims=True)
        if mean_ptr is not None:
            grad_normed -= grad_mean
        grad_x = (grad_normed - normed * slope) * rstd
        if grad_s_ptr is not None:
            if not EARLY:
                # Load it after the reduction, because before it registers are scarce.
                grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
            grad_x += grad_s.to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if LLAMA:
            normed = normed.to(s.dtype).to(tl.float32)
        if NEEDS_WEIGHT_GRAD:
            grad_weight += tl.sum(grad.to(tl.float32) * normed, 0, keep_dims=True)
        if y_ptr is not None:
            tl.store(y_ptr + at, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask)
        row += step
        if PREFETCH:
            s, grad, mean, rstd = next_s, next_grad, next_mean, next_rstd
    at = program.to(tl.int64) * columns * (NEEDS_WEIGHT_GRAD + NEEDS_BIAS_GRAD) + column
    if NEEDS_WEIGHT_GRAD:
        tl.store(partial_ptr + at, grad_weight, mask=inside)
    if NEEDS_BIAS_GRAD:
        tl.store(partial_ptr + at + columns * NEEDS_WEIGHT_GRAD, grad_bias, mask=inside)


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: NormOptions,
    centre: bool,
    out_dtype: torch.dtype,
    amax: Tensor | None = None,
    limit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Launch the kernel for `reference.norm_forward`."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    # On the host, empty_like and new_empty take half the time of torch.empty.
    y = torch.empty_like(x, dtype=out_dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centre else None
    s = x
    if residual is not None:
        residual = residual.contiguous()
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    if rows == 0:
        return y, s, mean, rstd
    if columns > MAX_WIDTH:
        raise ValueError(
            f"{'layer' if centre else 'rms'}_norm: rows of {columns} elements are too long; the "
            f"kernel keeps a whole row in registers and supports at most {MAX_WIDTH} elements"
        )
    setting = launch(FORWARD, columns)
    norm_forward_kernel[(cdiv(rows, setting.rows),)](
        x,
        residual,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        s,
        mean,
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
    return y, s, mean, rstd


def norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    options: NormOptions,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    recompute_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.norm_backward`."""
    grad_y = grad_y.contiguous()
    s = s.contiguous()
    if grad_s is not None:
        grad_s = grad_s.contiguous()
    columns = s.shape[-1]
    rows = s.numel() // columns if columns else 0
    grad_x = torch.empty_like(s)
    y = reusable(grad_y) if recompute_y else None
    centred = CENTRED_BACKWARD if grad_s is None else CENTRED_ADD_BACKWARD
    setting = launch(BACKWARD if mean is None else centred, columns)
    programs = num_programs(setting, rows, s.device)
    dtypes = [dtype for dtype in (weight_dtype, bias_dtype) if dtype is not None]
    partial = s.new_empty((programs, len(dtypes) * columns), dtype=torch.float32)
    if rows:
        norm_backward_kernel[(programs,)](
            grad_y,
            grad_s,
            s,
            None if weight is None else weight.contiguous(),
            mean,
            rstd,
            grad_x,
            y,
            partial if dtypes else None,
            rows,
            columns,
            options.offset,
            LLAMA=options.casting_mode == "llama",
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
    return grad_x, grad_weight, grad_bias, y
