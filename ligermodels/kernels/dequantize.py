"""Turn 4-bit codes back into the weights that they stand for."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import select

# NormalFloat4: quantiles of a normal distribution, divided by the largest. arXiv:2305.14314, E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def dequantize(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that 4-bit codes stand for: a level for each code, times a scale.

    It has no gradient.

    Args:
        codes: (rows, columns / 2) uint8. The low four bits of a row are the codes of the first half
            of its columns, and the high four bits those of the second half.
        scales: (rows, blocks), floating point: each is for columns / blocks neighbouring columns.
        levels: (16,) float32, the value of each code.
        dtype: of the result.
    Returns: (rows, columns), computed in float32 and rounded once.
    Source: arXiv:2305.14314, without the second quantisation of the scales.
    """
    return select("dequantize", codes).dequantize_forward(codes, scales, levels, dtype)
