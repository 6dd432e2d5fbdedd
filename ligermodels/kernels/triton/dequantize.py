"""The values of 4-bit and 8-bit codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch

DEQUANTIZE = Launches(nvidia=Launch(1024, 4), amd=Launch(2048, 4))


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, levels_ptr, out_ptr, width, block_size, blocks, BLOCK: tl.constexpr
):
    """Each program handles one block of bytes of one row, which are two runs of columns.

    Without levels, a byte is one code, and a row has one scale.
    """
    pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    codes = tl.load(codes_ptr + row * width + column, mask=mask, other=0)
    dtype = out_ptr.dtype.element_ty
    if levels_ptr is None:
        out = codes.to(tl.float32) * tl.load(scales_ptr + row).to(tl.float32)
        tl.store(out_ptr + row * width + column, out.to(dtype), mask=mask)
    else:
        codes = codes.to(tl.int32)
        scale_ptr = scales_ptr + row * blocks
        low = tl.load(levels_ptr + (codes & 15))
        high = tl.load(levels_ptr + (codes >> 4))
        at = column // block_size
        low *= tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
        at = (column + width) // block_size
        high *= tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32)
        out_ptr += row * 2 * width
        tl.store(out_ptr + column, low.to(dtype), mask=mask)
        tl.store(out_ptr + width + column, high.to(dtype), mask=mask)


def dequantize_forward(
    codes: Tensor, scales: Tensor, levels: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Launch the kernel for `reference.dequantize_forward`."""
    codes, scales = codes.contiguous(), scales.contiguous()
    (rows, width), blocks = codes.shape, scales.shape[1]
    columns = width if levels is None else 2 * width
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    setting = launch(DEQUANTIZE, width)
    dequantize_kernel[(rows * cdiv(width, setting.block),)](
        codes, scales, levels, out, width, columns // blocks, blocks, **keywords(setting)
    )
    return out
