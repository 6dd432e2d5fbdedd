"""The dtypes that ops take and calculate in."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype an op calculates in: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). Compiled, torch 2.11 loses the gradient through a `to` that changes nothing."""
    return x if x.dtype == dtype else x.to(dtype)
