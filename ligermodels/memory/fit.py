"""Plan a model's memory: measure the device, simulate, search, and agree among ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ligermodels.errors import ConfigError
from ligermodels.memory.plan import MemoryPlan
from ligermodels.memory.planner import find_plan, largest, parse_bytes
from ligermodels.memory.rates import Rates, rates_of
from ligermodels.memory.simulate import Simulation, simulate

# The allocator's blocks do not fit together exactly: this part of a budget is not planned for.
RESERVE = 0.03
_TILES = (16384, 8192, 4096, 2048)


class Planned(Protocol):
    """A model that takes a memory plan."""

    layers: nn.ModuleList
    memory_plan: Any

    def set_memory_plan(self, plan: MemoryPlan | None) -> None:
        """Choose what each layer keeps for backward."""


@dataclass(frozen=True)
class Step:
    """What a training step consists of besides the model; `plan_memory` explains each."""

    optimizer_bytes: int | torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None
    packed: bool = False
    max_seqlen: int | None = None
    head_options: dict[str, Any] | None = None
    gradients: Literal["new", "kept", "freed"] = "new"


def plan_memory(
    model: Any,
    batch: int,
    seq: int,
    budget: int | str = "auto",
    host_budget: int | str = 0,
    *,
    reserve: float = RESERVE,
    rates: Rates | None = None,
    device: torch.device | str | None = None,
    **step: Any,
) -> MemoryPlan:
    """Return the fastest memory plan with which a training step fits a budget.

    Call it on every rank of a distributed run. Rank 0 measures the device, the smallest budget of
    all ranks counts, and every rank gets the same plan.

    Args:
        model: a model that takes memory plans; its parameters and frozen parts count as they are.
        batch, seq: the shape of the largest batch; smaller ones, evaluation among them, need less.
        budget: bytes of GPU memory for everything in this process, as an int or a text such as
            "40GiB"; "auto" is the memory that is free, and what this process already holds.
        host_budget: bytes of pinned host memory, for this rank.
        reserve: the part of the budget that is left for fragmentation.
        rates: the device's rates. By default they are measured, or come from a data sheet if the
            device is not a GPU of this machine.
        device: the device to plan for. By default it is that of the parameters.
        optimizer_bytes: bytes of the optimizer's states, or the optimizer itself. By default they
            are twice the bytes of the parameters that need gradients, as for AdamW.
        autocast: the dtype of torch.autocast, if forward runs under it.
        packed: whether the rows contain several documents (position_ids).
        max_seqlen: with cu_seqlens, the longest document.
        head_options: options for the loss head.
        gradients: "new" if they are allocated in every backward (zero_grad(set_to_none=True)),
            "kept" if they exist before forward, "freed" if the optimizer runs in backward.
    Raises:
        ConfigError: the budget is too small; the message names the least bytes. Or a number of
            bytes cannot be read, or host memory is asked for where there is no GPU.
    """
    target = _device(model, device)
    options = Step(**step)
    allowed = _smallest_on_all_ranks(_budget(budget, target))
    host = parse_bytes(host_budget, "host_budget")
    fixed = _optimizer_bytes(model, options.optimizer_bytes) + int(reserve * allowed)
    if rates is None:
        rates = _from_rank_0(lambda: rates_of(target, _dtype(model, options)))
    known = rates
    return _from_rank_0(
        lambda: find_plan(
            lambda plan: simulated(model, plan, batch, seq, target, options),
            len(model.layers),
            known,
            budget=allowed,
            host_budget=host,
            fixed_bytes=fixed,
            tiles=[tile for tile in _TILES if tile < batch * seq],
            batch=batch,
            seq=seq,
        )
    )


def largest_batch(model: Any, seq: int, budget: int | str = "auto", **options: Any) -> int:
    """Return the largest batch with which a step fits. The arguments are those of `plan_memory`."""
    return largest(lambda batch: _fits(model, batch, seq, budget, options))


def largest_seq(model: Any, batch: int, budget: int | str = "auto", **options: Any) -> int:
    """Return the longest rows with which a step fits, within 2%; see `plan_memory`."""
    return largest(lambda seq: _fits(model, batch, seq, budget, options), start=128)


def _fits(model: Any, batch: int, seq: int, budget: int | str, options: dict[str, Any]) -> bool:
    try:
        plan_memory(model, batch, seq, budget, **options)
    except ConfigError:
        return False
    return True


def simulated(
    model: Any, plan: MemoryPlan, batch: int, seq: int, device: torch.device, step: Step
) -> Simulation:
    """Simulate a step under a plan, and give the model its own plan back."""
    before = model.memory_plan
    model.set_memory_plan(plan)
    try:
        return simulate(
            model,
            batch,
            seq,
            device=device,
            autocast=step.autocast,
            packed=step.packed,
            max_seqlen=step.max_seqlen,
            head_options=step.head_options,
            gradients=step.gradients,
        )
    finally:
        model.set_memory_plan(before)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    return torch.device(device) if device is not None else next(model.parameters()).device


def _dtype(model: nn.Module, step: Step) -> torch.dtype:
    return step.autocast or next(model.parameters()).dtype


def _budget(budget: int | str, device: torch.device) -> int:
    if budget != "auto":
        return parse_bytes(budget, "budget")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f'budget="auto" needs a GPU, and the model is on {device}; pass the bytes of the GPU '
            'that you plan for, such as budget="80GiB"'
        )
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _optimizer_bytes(model: nn.Module, given: int | torch.optim.Optimizer | None) -> int:
    if isinstance(given, int):
        return given
    trained = sum(_local_bytes(p) for p in model.parameters() if p.requires_grad)
    if given is None:
        return 2 * trained
    states = [v for state in given.state.values() for v in state.values()]
    held = sum(
        _local_bytes(v) for v in states if isinstance(v, torch.Tensor) and v.device.type != "cpu"
    )
    # Before its first step an optimizer has no states yet; most keep two tensors per parameter.
    return held or 2 * trained


def _local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _smallest_on_all_ranks(budget: int) -> int:
    if not _distributed():
        return budget
    budgets: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(budgets, budget)
    return min(budgets)


def _from_rank_0(compute: Callable[[], Any]) -> Any:
    """Return what rank 0 computes, or raise its ConfigError on every rank."""
    if not _distributed():
        return compute()
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [compute()]
        except ConfigError as fault:
            made = [fault]
    dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], ConfigError):
        raise made[0]
    return made[0]
