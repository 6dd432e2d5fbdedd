"""The bytes that an optimizer keeps, also before its first step, and those that a step takes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.memory.tracker import plain

# Two states of a parameter's shape and dtype: what AdamW keeps, and what is taken for granted of
# an optimizer that is not known.
_ADAM = 2


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states on the devices of its parameters.

    Before its first step an optimizer has none. Then they are told from its class: Adam and its
    relatives, SGD, Adafactor and Muon of torch, and the optimizers of torchao in 8 bits and fewer.
    Others count as Adam. An optimizer that is made of others has them in `inner_optimizers`.
    """
    inner = getattr(optimizer, "inner_optimizers", [])
    held = [value for state in optimizer.state.values() for value in state.values()]
    found = sum(x.nbytes for x in _plain(held) if x.device.type != "cpu" or _on_cpu(optimizer))
    if found or not inner:
        return found or sum(_expected(optimizer))
    return sum(map(state_bytes, inner))


def adam_bytes(model: nn.Module) -> int:
    """Return the bytes of Adam's states for the parameters of a model that need gradients."""
    return sum(_ADAM * local(p).nbytes for p in model.parameters() if p.requires_grad)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parameters are on the CPU, where some optimizers keep a count of steps."""
    return all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


def _plain(values: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors that hold the data of some values; one in 8 bits is made of several."""
    for value in values:
        if isinstance(value, Tensor):
            yield from plain(local(value))


def _expected(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yield the bytes of the states of each parameter that is trained."""
    for group in optimizer.param_groups:
        for parameter in _trained(group):
            yield _expected_of(optimizer, group, local(parameter))


def _trained(group: dict[str, Any]) -> list[Tensor]:
    """Return what a group trains: parameters, or parts of them."""
    return [p for p in group["params"] if p.requires_grad or not isinstance(p, nn.Parameter)]


def _expected_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], x: Tensor) -> int:
    amsgrad = bool(group.get("amsgrad"))
    if isinstance(optimizer, torch.optim.SGD):
        return x.nbytes if group["momentum"] else 0
    if isinstance(optimizer, torch.optim.Muon):
        return x.nbytes
    if isinstance(optimizer, torch.optim.Adafactor):
        # A mean of squares for each row and for each column of a matrix.
        numbers = x[..., 0].numel() + x[..., 0, :].numel() if x.ndim > 1 else x.numel()
        return numbers * x.itemsize
    if hasattr(optimizer, "_new_buffer"):  # torchao's: the states of its classes differ in bits
        stand_in = torch.empty_like(x, device="meta")
        made = [optimizer._new_buffer(stand_in, signed) for signed in (True, False)]
        return sum(each.nbytes for each in _plain(made + made[1:] * amsgrad))
    return (_ADAM + amsgrad) * x.nbytes


def step_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that a step allocates for itself while all gradients exist."""
    optimizers = getattr(optimizer, "inner_optimizers", [optimizer])
    return max(
        (_step_bytes_of(each, group) for each in optimizers for group in each.param_groups),
        default=0,
    )


def _step_bytes_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    sizes = [local(p).nbytes for p in _trained(group)]
    counts = [local(p).numel() for p in _trained(group)]
    if not sizes or group.get("fused"):
        return 0
    if hasattr(optimizer, "_new_buffer"):  # torchao's: both states of a parameter in float32
        return 2 * 4 * max(counts)
    if isinstance(optimizer, torch.optim.Muon):  # the update, and three matrices in bfloat16
        return max(size + 3 * 2 * count for size, count in zip(sizes, counts))
    before = [0, *sizes]  # of the parameter before, of which a tensor is still there
    if isinstance(optimizer, torch.optim.Adafactor):
        return max(map(sum, zip(sizes, before)))
    if isinstance(optimizer, torch.optim.SGD) and not group["weight_decay"]:
        return 0
    on_gpu = any(local(p).is_cuda for p in _trained(group))
    if group.get("foreach") or (group.get("foreach") is None and on_gpu):
        return sum(sizes)  # all parameters are updated at once
    return max(map(sum, zip(sizes, sizes, before)))
