"""LayerNorm with the residual add, forward and backward in one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.settings import check_norm_width, launch, num_programs
from ligermodels.kernels.triton.column_sums import column_sums


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
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of whole rows a program."""
    eps = tl.cast(eps, tl.float32)  # torch.compile passes Python floats as float64
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    mask = (row < rows) & inside
    at = row.to(tl.int64) * columns + column
    s = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        # The statistics are those of the sum as stored.
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, s, mask=mask)
    s = s.to(tl.float32)
    mean = tl.sum(s, 1, keep_dims=True) / columns
    # Twice over the row, which is in registers: the mean of squares less the squared mean cancels.
    centred = tl.where(mask, s - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1, keep_dims=True) / columns + eps)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    row,
    rows,
    column,
    columns,
    WITH_GRAD_S: tl.constexpr,
):
    """What the backward reads of a tile of rows, as it is stored."""
    mask = (row < rows) & (column < columns)
    at = row.to(tl.int64) * columns + column
    s = tl.load(s_ptr + at, mask=mask, other=0.0)
    grad = tl.load(grad_y_ptr + at, mask=mask, other=0.0)
    grad_s = grad
    if WITH_GRAD_S:
        grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
    mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    return s, grad, grad_s, mean, rstd


@triton.jit
def layer_norm_backward_kernel(
    grad_y_ptr,
    grad_s_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    rows,
    columns,
    HAS_GRAD_S: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Many tiles of rows a program, which sums their part of the gradients of weight and bias.

    With PREFETCH the next tile is on its way while this one waits for its reductions.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    grad_weight = tl.zeros((1, BLOCK), tl.float32)
    grad_bias = tl.zeros((1, BLOCK), tl.float32)
    if PREFETCH:
        s, grad, grad_s, mean, rstd = _tile(
            grad_y_ptr,
            grad_s_ptr,
            s_ptr,
            mean_ptr,
            rstd_ptr,
            row,
            rows,
            column,
            columns,
            HAS_GRAD_S,
        )
    for _first in range(program * ROWS, rows, step):
        if PREFETCH:
            next_s, next_grad, next_grad_s, next_mean, next_rstd = _tile(
                grad_y_ptr,
                grad_s_ptr,
                s_ptr,
                mean_ptr,
                rstd_ptr,
                row + step,
                rows,
                column,
                columns,
                HAS_GRAD_S,
            )
        else:
            s, grad, _unused, mean, rstd = _tile(
                grad_y_ptr,
                grad_s_ptr,
                s_ptr,
                mean_ptr,
                rstd_ptr,
                row,
                rows,
                column,
                columns,
                False,
            )
        mask = (row < rows) & inside
        at = row.to(tl.int64) * columns + column
        normed = (s.to(tl.float32) - mean) * rstd
        grad_normed = grad.to(tl.float32)
        if WANT_WEIGHT:
            grad_weight += tl.sum(grad_normed * normed, 0, keep_dims=True)
        if WANT_BIAS:
            grad_bias += tl.sum(grad_normed, 0, keep_dims=True)
        if HAS_WEIGHT:
            # From the cache at every row: in registers it would spill at the longest rows.
            grad_normed *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        # Beyond the row's end grad is zero, and so are both summands.
        grad_mean = tl.sum(grad_normed, 1, keep_dims=True) / columns
        slope = tl.sum(grad_normed * normed, 1, keep_dims=True) / columns
        grad_x = (grad_normed - grad_mean - normed * slope) * rstd
        if HAS_GRAD_S:
            if not PREFETCH:
                # Only now: before the reduction it would take registers from the rest.
                grad_s = tl.load(grad_s_ptr + at, mask=mask, other=0.0)
            grad_x += grad_s.to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        row += step
        if PREFETCH:
            s, grad, grad_s, mean, rstd = next_s, next_grad, next_grad_s, next_mean, next_rstd
    if WANT_WEIGHT:
        tl.store(partial_weight_ptr + program * columns + column, grad_weight, mask=inside)
    if WANT_BIAS:
        tl.store(partial_bias_ptr + program * columns + column, grad_bias, mask=inside)


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.layer_norm_forward` on the GPU."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    y = torch.empty_like(x)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    s = x
    if residual is not None:
        residual = residual.contiguous()
        s = torch.empty(
            x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device
        )
    if rows == 0:
        return y, s, mean, rstd
    check_norm_width("layer_norm", columns)
    setting = launch("layer_norm_forward", columns)
    layer_norm_forward_kernel[(triton.cdiv(rows, setting.rows),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight.contiguous(),
        x if bias is None else bias.contiguous(),
        y,
        s,
        mean,
        rstd,
        rows,
        columns,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ROWS=setting.rows,
        BLOCK=setting.block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return y, s, mean, rstd


def layer_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    want_weight: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`reference.layer_norm_backward` on the GPU."""
    grad_y = grad_y.contiguous()
    s = s.contiguous()
    if grad_s is not None:
        grad_s = grad_s.contiguous()
    columns = s.shape[-1]
    rows = s.numel() // columns if columns else 0
    grad_x = torch.empty_like(s)
    setting = launch("layer_norm_backward", columns)
    programs = num_programs(setting, rows, s.device)

    def partial(wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.empty((programs, columns), dtype=torch.float32, device=s.device)

    partial_weight, partial_bias = partial(want_weight), partial(want_bias)
    if rows:
        layer_norm_backward_kernel[(programs,)](
            grad_y,
            s if grad_s is None else grad_s,
            s,
            s if weight is None else weight.contiguous(),
            mean,
            rstd,
            grad_x,
            rstd if partial_weight is None else partial_weight,
            rstd if partial_bias is None else partial_bias,
            rows,
            columns,
            HAS_GRAD_S=grad_s is not None,
            HAS_WEIGHT=weight is not None,
            WANT_WEIGHT=want_weight,
            WANT_BIAS=want_bias,
            ROWS=setting.rows,
            BLOCK=setting.block,
            PREFETCH=setting.num_stages > 1 and s.element_size() <= 2,
            num_warps=setting.num_warps,
            num_stages=setting.num_stages,
        )
    grad_weight = None if partial_weight is None else column_sums(partial_weight, torch.float32)
    grad_bias = None if partial_bias is None else column_sums(partial_bias, torch.float32)
    return grad_x, grad_weight, grad_bias
