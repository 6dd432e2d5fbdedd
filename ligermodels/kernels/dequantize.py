"""Turn 4-bit codes back into the weights that they stand for."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import select


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
