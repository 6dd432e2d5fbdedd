"""Multiply a tensor by a scalar on the device and round to another dtype, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, launch

SCALED = Launches(nvidia=((None, Launch(4096, 8)),), amd=((None, Launch(4096, 8)),))


@triton.jit
def scaled_kernel(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Each program handles one block of elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = x * tl.load(scale_ptr).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch the kernel for `reference.scaled`."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if out.numel() == 0:
        return out
    setting = launch(SCALED, x.numel())
    scaled_kernel[(cdiv(x.numel(), setting.block),)](
        x,
        scale,
        out,
        x.numel(),
        BLOCK=setting.block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return out
