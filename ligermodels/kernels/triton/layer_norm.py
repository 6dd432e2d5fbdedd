"""LayerNorm with the residual add, forward and backward in one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.settings import (
    LAYER_NORM_PROGRAMS,
    check_norm_width,
    launch,
    num_multiprocessors,
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
    columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    eps = tl.cast(eps, tl.float32)  # torch.compile passes Python floats as float64
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    at = row * columns + column
    s = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        # The statistics are those of the sum as stored.
        s = (s.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, s, mask=mask)
    s = s.to(tl.float32)
    mean = tl.sum(s, 0) / columns
    # Twice over the row, which is in registers: the mean of squares less the squared mean cancels.
    centred = tl.where(mask, s - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = centred * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
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
    partial_weight_ptr,
    partial_bias_ptr,
    rows,
    columns,
    HAS_GRAD_S: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Many rows a program, which sums their part of the gradients of weight and bias."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    grad_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns + column
        s = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = (s - tl.load(mean_ptr + row)) * rstd
        if WANT_WEIGHT:
            grad_weight += grad * normed
        if WANT_BIAS:
            grad_bias += grad
        if HAS_WEIGHT:
            # From the cache at every row: in registers it would spill at the longest rows.
            grad *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        # Beyond the row's end grad is zero, and so are both summands.
        mean = tl.sum(grad, 0) / columns
        slope = tl.sum(grad * normed, 0) / columns
        grad_x = (grad - mean - normed * slope) * rstd
        if HAS_GRAD_S:
            grad_x += tl.load(grad_s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if WANT_WEIGHT:
        tl.store(partial_weight_ptr + program * columns + column, grad_weight, mask=mask)
    if WANT_BIAS:
        tl.store(partial_bias_ptr + program * columns + column, grad_bias, mask=mask)


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
    block, num_warps, num_stages = launch("layer_norm_forward", columns)
    layer_norm_forward_kernel[(rows,)](
        x,
        x if residual is None else residual,
        x if weight is None else weight.contiguous(),
        x if bias is None else bias.contiguous(),
        y,
        s,
        mean,
        rstd,
        columns,
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=num_warps,
        num_stages=num_stages,
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
    programs = min(rows, LAYER_NORM_PROGRAMS * num_multiprocessors(s.device.index))

    def partial(wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.empty((programs, columns), dtype=torch.float32, device=s.device)

    partial_weight, partial_bias = partial(want_weight), partial(want_bias)
    if rows:
        block, num_warps, num_stages = launch("layer_norm_backward", columns)
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
            BLOCK=block,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    grad_weight = None if partial_weight is None else partial_weight.sum(0)
    grad_bias = None if partial_bias is None else partial_bias.sum(0)
    return grad_x, grad_weight, grad_bias
