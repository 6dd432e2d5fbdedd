"""torch.autocast for the fused ops: they cast their operands first and disable it inside."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ligermodels.kernels.simulation import simulator_of


def autocast_is_on(x: Tensor) -> bool:
    """Return whether autocast is enabled for x's device."""
    kind = x.device.type
    if kind == "meta":
        simulator = simulator_of(x.device)
        return simulator is not None and simulator.autocast is not None
    return torch.is_autocast_enabled(kind)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts operands of matmuls with x.

    Return None if autocast is disabled or x is float64.
    """
    if not autocast_is_on(x) or x.dtype == torch.float64:
        return None
    simulator = simulator_of(x.device)
    return torch.get_autocast_dtype(x.device.type) if simulator is None else simulator.autocast


def cast_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast weight and bias of a linear of x as autocast does. The casts are differentiable."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return weight, bias
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast is disabled for x's device."""
    if not autocast_is_on(x):
        return nullcontext()
    simulator = simulator_of(x.device)
    if simulator is not None:
        return simulator.without_autocast()
    return torch.autocast(x.device.type, enabled=False)
