"""silu(gate) * up on packed rows, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.settings import launch


@triton.jit
def swiglu_forward_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """A block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    gate_up_ptr,
    grad_ptr,
    grad_gate_up_ptr,
    out_ptr,
    width,
    WANT_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one row a program; the output again where it is wanted."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_up_ptr + at, grad_gate.to(dtype), mask=mask)
    tl.store(grad_gate_up_ptr + at + width, (grad * silu).to(dtype), mask=mask)
    if WANT_OUT:
        out = (silu * up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + column, out, mask=mask)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """`reference.swiglu_forward` on the GPU."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel() == 0:
        return out
    block, num_warps, num_stages = launch("swiglu_forward", width)
    swiglu_forward_kernel[(out.numel() // width, triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=num_warps, num_stages=num_stages
    )
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor, want_out: bool) -> tuple[Tensor, Tensor | None]:
    """`reference.swiglu_backward` on the GPU."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    width = grad.shape[-1]
    grad_gate_up = torch.empty_like(gate_up)
    out = gate_up.new_empty(grad.shape) if want_out else None
    if grad.numel() == 0:
        return grad_gate_up, out
    block, num_warps, num_stages = launch("swiglu_backward", width)
    swiglu_backward_kernel[(grad.numel() // width, triton.cdiv(width, block))](
        gate_up,
        grad,
        grad_gate_up,
        grad_gate_up if out is None else out,
        width,
        WANT_OUT=want_out,
        BLOCK=block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return grad_gate_up, out
