"""Weights in MXFP4, four bits each with a power of two for each 32 of them, as bfloat16."""

import numpy as np
import torch
from torch import Tensor

# The values of the codes 0 to 7; 8 to 15 are their negatives.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _pairs() -> np.ndarray:
    """Return for each byte the bits of its two values in bfloat16, the low four bits first."""
    values = torch.tensor([*_VALUES, *(-x for x in _VALUES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte % 16], values[byte // 16]), -1)
    return pairs.view(torch.int32).squeeze(-1).numpy()


_PAIRS = _pairs()


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values in bfloat16, which holds them exactly.

    Args: blocks (..., groups, 16) uint8, two codes in a byte, the low four bits first; scales
        (..., groups) uint8, the exponent of two plus 127.
    Returns: (..., groups * 32).
    Source: OCP Microscaling Formats (MX) specification 1.0, section 5.3.3.
    """
    codes = torch.from_numpy(np.take(_PAIRS, blocks.numpy())).view(torch.bfloat16)
    exponent = scales.to(torch.int16)
    # The bits of bfloat16: its exponent begins at bit 7, and 2^-127 has none.
    factor = torch.where(exponent == 0, 0x40, exponent << 7).view(torch.bfloat16)
    return (codes * factor[..., None]).flatten(-2)
