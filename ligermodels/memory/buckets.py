"""The buckets in which `DistributedDataParallel` averages gradients.

Source: torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size`, with the
default sizes. The buckets exist as long as the wrapper, and hold all gradients once.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

# "copies": gradients are separate tensors. "views": they are views of the buckets, which is
# gradient_as_bucket_view=True.
Buckets = Literal["copies", "views"]

_FIRST, _OTHERS = 2**20, 25 * 2**20  # bytes after which a bucket takes no further gradient


def buckets(trained: Iterable[Tensor]) -> list[Tensor]:
    """Return meta tensors of the sizes of the buckets; the parameters are in the model's order."""
    limit = _FIRST
    open_buckets: dict[torch.dtype, int] = {}  # elements
    made: list[tuple[int, torch.dtype]] = []
    for x in reversed([*trained]):  # about the order in which backward computes the gradients
        count = open_buckets.pop(x.dtype, 0) + x.numel()
        if count * x.itemsize >= limit:
            made.append((count, x.dtype))
            limit = _OTHERS
        else:
            open_buckets[x.dtype] = count
    made += ((count, dtype) for dtype, count in open_buckets.items())
    return [torch.empty(count, dtype=dtype, device="meta") for count, dtype in made]
