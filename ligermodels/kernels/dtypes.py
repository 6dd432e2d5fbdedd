"""The dtype in which an op computes, and casts to it."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which an op computes: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), or x itself if it already has this dtype.

    Under torch.compile, torch 2.11 loses the gradient of a `to` that changes nothing.
    """
    return x if x.dtype == dtype else x.to(dtype)
