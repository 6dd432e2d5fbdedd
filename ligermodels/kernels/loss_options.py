"""What the cross entropy ops are told and tell, beside the loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dtypes import compute_dtype


class CrossEntropyOptions(NamedTuple):
    """What the cross entropy kernels take beside tensors; `cross_entropy` explains each."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class TokenStats(NamedTuple):
    """What is known of each token beside its loss, (rows) each; zeros where it is ignored."""

    log_probs: Tensor  # log softmax(t) at the target, float32, or float64 for float64 logits
    entropy: Tensor  # of softmax(t) in nats, same dtype
    correct: Tensor  # bool: no class has a higher logit, nor an equal one and a lower index

    @classmethod
    def empty(cls, rows: int, logits: Tensor) -> "TokenStats":
        """Uninitialised memory for the statistics of `rows` tokens, on the device of `logits`."""
        dtype, device = compute_dtype(logits), logits.device
        return cls(
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=torch.bool, device=device),
        )


class StatsScale(NamedTuple):
    """Upstream gradients of the statistics, (rows) each, and the entropy that the second needs."""

    log_probs: Tensor | None
    entropy: Tensor | None
    value: Tensor | None  # the entropy itself, from the forward pass
