"""AdamW whose update of a large parameter is one kernel at the bandwidth of the GPU."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import choose, select

LARGE = 2**20  # elements; PyTorch updates smaller parameters together, in few launches


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(..., fused=True)` with the same state, faster for large parameters.

    PyTorch's kernel reaches two thirds of the bandwidth of an H100. It still updates parameters on
    a CPU, in float64, of fewer than 2^20 elements, or of a group with amsgrad or maximize.

    Args: params, lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; lr is a number.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists, but update what is large here and leave PyTorch the rest."""
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        options = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        filled = [each for each in lists if each]  # parameter, gradient, two moments, step
        usual = not (group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor))
        rest, steps = [], []
        for tensors in zip(*filled):
            local = [getattr(each, "_local_tensor", each) for each in tensors]  # of a DTensor
            placements = {getattr(each, "placements", None) for each in tensors[:4]}
            alike = len(placements) == 1 and getattr(self, "found_inf", None) is None
            if usual and alike and all(map(_is_large, local[:4])):
                select("adamw", local[0]).adamw(*local, *options)
                steps.append(tensors[-1])
            else:
                rest.append(tensors)
        if steps:
            torch._foreach_add_(steps, 1)
            for each, left in zip(filled, zip(*rest) if rest else [()] * 5):
                each[:] = left
        return has_complex


def _is_large(x: Tensor) -> bool:
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_contiguous()
    return plain and x.numel() >= LARGE and choose(x.device, x.dtype)[0] == "triton"
