"""What every op asks of its tensors and numbers before it touches them."""

import operator
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floating(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError for integers, and for floats of 8 bits, which no op calculates with."""
    if x.dtype not in FLOATING:
        raise ValueError(
            f"{op}: {name} is {x.dtype}; expected a floating point tensor of 16 bits or more"
        )


def check_count(op: str, name: str, value: Any, least: int) -> int:
    """The value as an int, numpy's integers too; raise ValueError for less or anything else."""
    count = value
    if not isinstance(value, (int, Tensor)):
        try:
            count = operator.index(value)
        except TypeError:
            count = None
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{op}: {name}={value!r}; expected an integer of {least} or more")
    return count
