"""RMSNorm with the residual add, forward and backward in one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.settings import (
    RMS_NORM_PROGRAMS,
    check_norm_width,
    launch,
    num_multiprocessors,
)


@triton.jit
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    columns,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    LLAMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    # torch.compile passes Python floats as float64.
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
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
    s_float = s.to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(s_float * s_float, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    normed = s_float * rstd
    if LLAMA:
        normed = normed.to(s.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(y_ptr + at, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask)


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
    HAS_GRAD_S: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_Y: tl.constexpr,
    LLAMA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Many rows a program, which sums their part of the weight gradient."""
    offset = tl.cast(offset, tl.float32)  # torch.compile passes Python floats as float64
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + offset
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns + column
        s = tl.load(s_ptr + at, mask=mask, other=0.0)
        grad = tl.load(grad_y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normed = s.to(tl.float32) * rstd
        grad_normed = grad * weight
        mean = tl.sum(grad_normed * normed, 0) / columns
        grad_x = (grad_normed - normed * mean) * rstd
        if HAS_GRAD_S:
            grad_x += tl.load(grad_s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if LLAMA:
            normed = normed.to(s.dtype).to(tl.float32)
        if WANT_WEIGHT:
            grad_weight += grad * normed
        if WANT_Y:
            tl.store(y_ptr + at, (normed * weight).to(y_ptr.dtype.element_ty), mask=mask)
    if WANT_WEIGHT:
        tl.store(partial_ptr + program * columns + column, grad_weight, mask=mask)


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    casting: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.rms_norm_forward` on the GPU."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns if columns else 0
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    s = x
    if residual is not None:
        residual = residual.contiguous()
        s = torch.empty(
            x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device
        )
    if rows == 0:
        return y, s, rstd
    check_norm_width("rms_norm", columns)
    block, num_warps, num_stages = launch("rms_norm_forward", columns)
    rms_norm_forward_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight.contiguous(),
        y,
        s,
        rstd,
        columns,
        eps,
        offset,
        HAS_RESIDUAL=residual is not None,
        LLAMA=casting == "llama",
        BLOCK=block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return y, s, rstd


def rms_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    casting: str,
    want_weight: bool,
    want_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`reference.rms_norm_backward` on the GPU."""
    grad_y = grad_y.contiguous()
    s = s.contiguous()
    if grad_s is not None:
        grad_s = grad_s.contiguous()
    columns = s.shape[-1]
    rows = s.numel() // columns if columns else 0
    grad_x = torch.empty_like(s)
    y = torch.empty_like(grad_y) if want_y else None
    if rows == 0:
        return grad_x, torch.zeros_like(weight) if want_weight else None, y
    programs = min(rows, RMS_NORM_PROGRAMS * num_multiprocessors(s.device.index))
    partial = None
    if want_weight:
        partial = torch.empty((programs, columns), dtype=torch.float32, device=s.device)
    block, num_warps, num_stages = launch("rms_norm_backward", columns)
    rms_norm_backward_kernel[(programs,)](
        grad_y,
        s if grad_s is None else grad_s,
        s,
        weight.contiguous(),
        rstd,
        grad_x,
        s if y is None else y,
        rstd if partial is None else partial,
        rows,
        columns,
        offset,
        HAS_GRAD_S=grad_s is not None,
        WANT_WEIGHT=want_weight,
        WANT_Y=want_y,
        LLAMA=casting == "llama",
        BLOCK=block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    grad_weight = None if partial is None else partial.sum(0).to(weight.dtype)
    return grad_x, grad_weight, y
