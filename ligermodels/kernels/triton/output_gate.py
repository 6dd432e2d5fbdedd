"""The gate on a layer's heads, with their RMS norm or without: one launch, in backward two.

The second launch of backward is small and sums the gradient of the weight. A row is a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import (
    Launch,
    Launches,
    cdiv,
    keywords,
    launch,
    num_programs,
    reusable,
    strided,
)
from ligermodels.kernels.triton.column_sums import column_sums

GATE = Launches(
    nvidia=((128, Launch(0, 4, rows=16)), (None, Launch(0, 4, rows=8))), amd=Launch(0, 4, rows=8)
)
GATE_BACKWARD = Launches(
    nvidia=((128, Launch(0, 4, rows=8, programs=8)), (None, Launch(0, 4, rows=4, programs=8))),
    amd=Launch(0, 4, rows=4, programs=8),
)


@triton.jit
def _load(
    ptr, batch_stride, seq_stride, head_stride, row, rows, seq, column, wide, HEADS: tl.constexpr
):
    """Load rows of (batch, seq, HEADS, columns), of any strides, in float32."""
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    at = token // seq * batch_stride + token % seq * seq_stride + head * head_stride
    mask = (row < rows)[:, None] & wide[None, :]
    return tl.load(ptr + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _share(gate, SILU: tl.constexpr):
    """Return act(gate) and its derivative."""
    share = tl.sigmoid(gate)
    slope = share * (1.0 - share)
    if SILU:
        slope = share + gate * slope
        share = gate * share
    return share, slope


@triton.jit
def output_gate_kernel(
    x_ptr,
    x_batch,
    x_seq,
    x_head,
    gate_ptr,
    gate_batch,
    gate_seq,
    gate_head,
    weight_ptr,
    y_ptr,
    grad_ptr,
    grad_x_ptr,
    grad_gate_ptr,
    partial_ptr,
    rows,
    seq,
    columns,
    eps,
    HEADS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles every so many tiles of rows: y of them, or with grad_ptr the gradients.

    The weight may be None; then there is no norm. With grad_ptr, y may be None, and a program
    writes its part of the gradient of the weight. It reads its rows before it writes them, so y may
    be grad.
    """
    column = tl.arange(0, BLOCK)
    wide = column < columns
    weight = tl.zeros((BLOCK,), tl.float32) + 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=wide, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & wide[None, :]
        x = _load(x_ptr, x_batch, x_seq, x_head, row, rows, seq, column, wide, HEADS)
        gate = _load(gate_ptr, gate_batch, gate_seq, gate_head, row, rows, seq, column, wide, HEADS)
        share, slope = _share(gate, SILU)
        if weight_ptr is not None:
            rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + tl.cast(eps, tl.float32))[:, None]
            x *= rstd
        if grad_ptr is not None:
            grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
            grad_x = grad * share * weight[None, :]
            if weight_ptr is not None:
                grad_weight += tl.sum(grad * share * x, 0)
                grad_x = rstd * (grad_x - x * (tl.sum(grad_x * x, 1) / columns)[:, None])
            tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        x *= weight[None, :]
        if grad_ptr is not None:
            grad_gate = (grad * x * slope).to(grad_gate_ptr.dtype.element_ty)
            tl.store(grad_gate_ptr + at, grad_gate, mask=mask)
        if y_ptr is not None:
            tl.store(y_ptr + at, (x * share).to(y_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(partial_ptr + at, grad_weight, mask=wide)


def _launch(
    programs: int,
    setting: Launch,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    activation: str,
    eps: float,
    *outputs: Tensor | None,
) -> None:
    columns = x.shape[-1]
    output_gate_kernel[(programs,)](
        *strided(x, gate),
        None if weight is None else weight.contiguous(),
        *outputs,
        *(x.numel() // columns, x.shape[1], columns, eps),
        HEADS=x.shape[2],
        SILU=activation == "silu",
        ROWS=setting.rows,
        **keywords(setting),
    )


def output_gate_forward(
    x: Tensor, gate: Tensor, weight: Tensor | None, activation: str, eps: float
) -> Tensor:
    """Launch the kernel for `reference.output_gate_forward`."""
    y = x.new_empty(x.shape)
    if y.numel():
        setting = launch(GATE, x.shape[-1])
        programs = cdiv(y.numel() // x.shape[-1], setting.rows)
        _launch(programs, setting, x, gate, weight, activation, eps, y, *(None,) * 4)
    return y


def output_gate_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    activation: str,
    eps: float,
    recompute_output: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.output_gate_backward`."""
    grad, columns = grad.contiguous(), x.shape[-1]
    grad_x, grad_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    y = reusable(grad) if recompute_output else None
    setting = launch(GATE_BACKWARD, columns)
    programs = num_programs(setting, x.numel() // columns if columns else 0, x.device)
    partial, grad_weight = None, None
    if weight is not None:
        partial = x.new_empty((programs, columns), dtype=torch.float32)
    if programs:
        results = y, grad, grad_x, grad_gate, partial
        _launch(programs, setting, x, gate, weight, activation, eps, *results)
    if partial is not None and weight is not None:
        (grad_weight,) = column_sums(partial, [weight.dtype])
    return grad_x, grad_gate, grad_weight, y
