"""What each target counts for: its class weight, or one."""

import torch
from torch import Tensor


def target_weights(targets: Tensor, class_weights: Tensor, ignore_index: int) -> Tensor:
    """The class weight of each target (rows); 0 for one ignored or outside the vocabulary."""
    valid = (targets != ignore_index) & (targets >= 0) & (targets < len(class_weights))
    return torch.where(valid, class_weights[torch.where(valid, targets, 0)], 0.0)


def target_weight_sum(
    targets: Tensor, class_weights: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """The sum of the targets' weights, a scalar: without class weights the number not ignored.

    Where none counts, it is 1.
    """
    if class_weights is None:
        return (targets != ignore_index).sum().clamp_(min=1).to(dtype)
    total = target_weights(targets, class_weights, ignore_index).to(dtype).sum()
    return torch.where(total == 0, 1.0, total)
