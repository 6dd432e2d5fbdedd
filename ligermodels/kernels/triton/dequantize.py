"""The values of 4-bit and 8-bit codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch

DEQUANTIZE = Launches(nvidia=((None, Launch(1024, 4)),), amd=((None, Launch(2048, 4)),))


@triton.jit
def dequantize_8_kernel(codes_ptr, scales_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Each program handles one block of one row, which has one scale."""
    pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    at = row * width + column
    codes = tl.load(codes_ptr + at, mask=column < width, other=0).to(tl.float32)
    out = codes * tl.load(scales_ptr + row).to(tl.float32)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, levels_ptr, out_ptr, half, block_size, blocks, BLOCK: tl.constexpr
):
    """Each program handles one block of bytes of one row, and writes two runs of columns."""
    program = tl.program_id(0)
    pieces = tl.cdiv(half, BLOCK)
    row = (program // pieces).to(tl.int64)
    column = program % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = column < half
    codes = tl.load(codes_ptr + row * half + column, mask=mask, other=0).to(tl.int32)
    scale_ptr = scales_ptr + row * blocks
    low = tl.load(levels_ptr + (codes & 15))
    high = tl.load(levels_ptr + (codes >> 4))
    low *= tl.load(scale_ptr + column // block_size, mask=mask, other=0.0).to(tl.float32)
    high *= tl.load(scale_ptr + (column + half) // block_size, mask=mask, other=0.0).to(tl.float32)
    out_ptr += row * 2 * half
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + column, low.to(dtype), mask=mask)
    tl.store(out_ptr + half + column, high.to(dtype), mask=mask)


def dequantize_forward(
    codes: Tensor, scales: Tensor, levels: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Launch a kernel for `reference.dequantize_forward`."""
    codes, scales = codes.contiguous(), scales.contiguous()
    if levels is None:
        rows, width = codes.shape
        out = torch.empty(rows, width, dtype=dtype, device=codes.device)
        if out.numel():
            setting = launch(DEQUANTIZE, width)
            grid = (rows * cdiv(width, setting.block),)
            dequantize_8_kernel[grid](codes, scales, out, width, **keywords(setting))
        return out
    rows, half = codes.shape
    blocks = scales.shape[1]
    out = torch.empty(rows, 2 * half, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    setting = launch(DEQUANTIZE, half)
    dequantize_kernel[(rows * cdiv(half, setting.block),)](
        codes,
        scales,
        levels,
        out,
        half,
        2 * half // blocks,
        blocks,
        **keywords(setting),
    )
    return out
