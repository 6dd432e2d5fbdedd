"""The memory of an optimizer, found by running its step on tensors without data."""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.layers.fusion import local_tensor
from ligermodels.memory.torch_private import FLOAT, plain
from ligermodels.memory.tracker import Tracker

# Two states of a parameter's shape and dtype.
_ADAM = 2


def adam_bytes(model: nn.Module) -> int:
    """Return the bytes of Adam's states for the parameters of a model that need gradients."""
    return sum(_ADAM * local_tensor(p).nbytes for p in model.parameters() if p.requires_grad)


def memory_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of an optimizer's states, and the most that a step allocates besides.

    A twin of the optimizer makes two steps on meta tensors; one that cannot counts as Adam. An
    optimizer that is made of others has them in `inner_optimizers`.
    """
    optimizers = getattr(optimizer, "inner_optimizers", [optimizer])
    made = [_of_group(each, group) for each in optimizers for group in each.param_groups]
    return sum(states for states, _ in made), max((most for _, most in made), default=0)


def _of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[int, int]:
    # What a group trains: parameters, or parts of them.
    trained = [p for p in group["params"] if p.requires_grad or not isinstance(p, nn.Parameter)]
    parameters = [torch.empty_like(local_tensor(p), device="meta") for p in trained]
    adam = sum(_ADAM * p.nbytes for p in parameters), 0
    numbers: Counter[Any] = Counter()
    is_of_torchao = hasattr(optimizer, "_new_buffer")
    if is_of_torchao:  # It updates one by one, so one parameter of each shape is enough.
        numbers = Counter(map(_kind, parameters))
        parameters = [*{_kind(p): p for p in parameters}.values()]
    for each in parameters:
        each.grad = torch.empty_like(each)
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in group.items()}
    # PyTorch fuses no step on meta tensors, and updates them one by one unless it is told not to.
    if "fused" in group:
        options["fused"] = False
    if "foreach" in group and group["foreach"] is None:
        options["foreach"] = any(p.is_cuda for p in trained)
    # A scheduler's step of the optimizer, and hooks, are not for the twin.
    own = {name: x for name, x in vars(optimizer).items() if name != "step" and "hook" not in name}
    if any(isinstance(x, torch.optim.Optimizer) for x in own.values()):
        return adam  # the twin's step would be one of the optimizer inside, on its parameters
    twin = object.__new__(type(optimizer))
    tracker = Tracker("cpu")
    tracker.hold([*parameters, *(each.grad for each in parameters)])
    try:
        twin.__setstate__(
            own | {"param_groups": [options | {"params": parameters}], "state": defaultdict(dict)}
        )
        with torch.compiler.set_stance("force_eager"), _Ones(), tracker:
            twin.step()
            before = tracker.bytes
            tracker.enter("second step")
            twin.step()
    except Exception:  # of any kind: the step of another library, or one that needs its GPU
        return adam
    states = sum(
        numbers.get(_kind(p), 1) * x.nbytes
        for p, state in twin.state.items()
        for x in plain(*state.values())
        if x.is_meta  # some keep a count of steps on the CPU
    )
    if group.get("fused"):
        return states, 0
    if is_of_torchao:  # compiled, with both states in float32
        return states, 2 * FLOAT * max((p.numel() for p in parameters), default=0)
    return states, tracker.phase.peak - before


def _kind(parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
    return parameter.shape, parameter.dtype


class _Ones(TorchDispatchMode):
    """Answers 1 where a step asks for the value of a number without data."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))
