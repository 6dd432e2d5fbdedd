"""Reference models: adapters off, without a second copy of the weights, or a frozen copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.models.base import DecoderModel


def token_log_probs(model: nn.Module, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
    """Return the log-probability of the label after each position: what the losses are made of.

    Args:
        model: a `DecoderModel`, or a wrapper of one (DDP, FSDP2, torch.compile).
        input_ids, labels: (batch, seq) int64. Labels are those of the model's forward: they are at
            the positions of the inputs, and -100 is ignored.
        inputs: position_ids, attention_mask and other arguments of the model's forward.
    Returns: (batch, seq) float32, differentiable. Position t is about label t + 1; it is 0 where
        that label is ignored, at the last position, and at the end of a document.
    """
    # 0 - x is never -0, unlike -x.
    return 0.0 - model(input_ids, labels=labels, reduction="none", **inputs).loss


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run the model without its adapters, as the reference model of the one that has them.

    Every module that has the method `enable_adapters`, as the layers of PEFT have, is switched off,
    and on again at the end, if it was on.

    Raises:
        ConfigError: the model has no such module, so it would be its own reference.
    """
    adapters: list[Any] = [
        module for module in model.modules() if callable(getattr(module, "enable_adapters", None))
    ]
    if not adapters:
        raise ConfigError(
            "the model has no adapters to switch off; make a reference model with frozen_copy"
        )
    on = [module for module in adapters if not getattr(module, "disable_adapters", False)]
    for module in on:
        module.enable_adapters(False)
    try:
        yield
    finally:
        for module in on:
            module.enable_adapters(True)


def frozen_copy(model: DecoderModel, dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    """Return a copy of the model for inference, whose weights are frozen and have this dtype.

    Each tensor is converted while it is copied, so at no time is there a second copy in the model's
    own dtype. `ligermodels.adapters.quantize` turns the weights of a copy into few bits.
    """
    # deepcopy takes what stands in the memo for a tensor or module instead of copying it.
    memo: dict[int, Any] = {id(model._offloaders): {}}
    for parameter in model.parameters():
        value = parameter.detach().to(dtype, copy=True)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=False)
    frozen = copy.deepcopy(model, memo).eval()
    frozen.set_memory_plan(None)
    return frozen


class WithoutAdapters(nn.Module):
    """The reference model of a model with adapters: the same weights, with its adapters off."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # The tuple keeps nn.Module from registering the model, whose parameters are not its own.
        self._model = (model,)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Return what the model returns without its adapters."""
        (model,) = self._model
        with adapters_off(model):
            return model(*args, **inputs)
