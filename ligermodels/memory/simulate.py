"""The memory and the work of a training step, found by running the step on meta tensors."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn


@dataclass
class Work:
    """What one pass computes and moves."""

    product_flops: int = 0  # of matrix products, two for each multiplication and addition
    attention_flops: int = 0  # of attention, over the query-key pairs that the mask leaves
    moved_bytes: int = 0  # read and written by all other ops
    to_host_bytes: int = 0
    from_host_bytes: int = 0


@dataclass
class Simulation:
    """What a training step takes on one device, without the optimizer and its states."""

    peak_bytes: int  # the most at any time, with weights, buffers, inputs and gradients
    peak_phase: str  # "forward of layer 3", "head", "backward of layer 3", ...
    weight_bytes: int  # parameters and buffers
    grad_bytes: int  # gradients of all parameters when backward ends
    kept_bytes: int  # what forward leaves for backward, without weights and inputs
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    peaks: dict[str, int] = field(default_factory=dict)  # the peak of each phase, in their order


def simulate(
    model: nn.Module,
    batch: int,
    seq: int,
    *,
    device: torch.device,
    autocast: torch.dtype | None = None,
    labels: bool = True,
    packed: bool = False,
    max_seqlen: int | None = None,
    head_options: dict[str, Any] | None = None,
    gradients: Literal["new", "kept", "freed"] = "new",
) -> Simulation:
    """Run forward and backward of a model on meta tensors, under its memory plan."""
    raise NotImplementedError
