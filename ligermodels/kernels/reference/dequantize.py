"""Plain PyTorch: the values of 4-bit and 8-bit codes."""

import torch
from torch import Tensor


def dequantize_forward(
    codes: Tensor, scales: Tensor, levels: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return a level for each code, times the scale of its block. arXiv:2305.14314.

    Without levels, codes are numbers of 8 bits, and scales are (rows, 1).
    """
    if levels is None:
        return (codes.float() * scales.float()).to(dtype)
    rows, half = codes.shape
    both = torch.cat([codes & 15, codes >> 4], 1)
    values = levels[both.int()].view(rows, scales.shape[1], 2 * half // scales.shape[1])
    return (values * scales[:, :, None].to(levels.dtype)).view(rows, 2 * half).to(dtype)
