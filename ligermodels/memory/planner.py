"""Find the fastest memory plan that fits a budget.

The step is simulated with each level in all layers. This gives what each layer keeps, what exists
besides at the worst time of its forward and backward, and its work, which `Rates` turn into
seconds. While a layer runs, only the tensors that it and the layers before it keep exist. The
fastest choice under these constraints, one for each layer, is found exactly by dynamic programming
over the layers. The chosen plan is then simulated as a whole. If its peak exceeds the budget, the
next slower plan is tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import KEEPS, Keep
from ligermodels.memory.byte_sizes import GIB
from ligermodels.memory.offload import HOLD
from ligermodels.memory.plan import LayerPlan, MemoryPlan, Prediction
from ligermodels.memory.rates import Rates
from ligermodels.memory.simulate import Simulation
from ligermodels.memory.tracker import Phase

# The search counts kept bytes, and bytes in host memory, in this many steps.
_STEPS, _HOST_STEPS = 8192, 32
_ROUNDS = 8
_MORE = (1, 2, 4, 8, 16, 32, 64)  # GiB

Simulate = Callable[[MemoryPlan], Simulation]


@dataclass(frozen=True)
class Option:
    """One level in one layer.

    Attributes:
        plan: the level, and where its tensors are.
        kept: bytes on the GPU from the layer's forward to its backward.
        host: bytes in host memory.
        beside: the most bytes that exist, while the layer runs forward or backward, besides what
            this layer and the layers before it keep.
        seconds: of forward and backward, with an estimate of how long they wait for copies.
        passes: seconds of forward and of backward, without waiting.
    """

    plan: LayerPlan
    kept: int
    host: int
    beside: int
    seconds: float
    passes: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Problem:
    """What a search chooses from.

    Attributes:
        layers: the options of each layer.
        at_head: the most bytes that exist between the layers' forward and their backward, besides
            what the layers keep.
        seconds: of the step outside the layers.
        host_bytes: bytes/s to or from host memory.
        unit: all kept bytes are multiples of it.
    """

    layers: tuple[tuple[Option, ...], ...]
    at_head: int
    seconds: float
    host_bytes: float = 1.0
    unit: int = 1

    def peak(self, plan: MemoryPlan) -> int:
        """Return the most bytes that exist under a plan, as the search counts them."""
        kept, peak = 0, 0
        for layer, options in zip(plan.layers, self.layers):
            option = next(option for option in options if option.plan == layer)
            kept += option.kept
            peak = max(peak, kept + option.beside)
        return max(peak, kept + self.at_head)

    def time(self, plan: MemoryPlan) -> float:
        """Return the seconds of a step under a plan, in which each direction copies in turn."""
        chosen = [
            next(option for option in options if option.plan.keep == layer.keep)
            for layer, options in zip(plan.layers, self.layers)
        ]
        copies = [
            option.kept / self.host_bytes if layer.host else 0.0
            for layer, option in zip(plan.layers, chosen)
        ]
        now = link = 0.0
        done = []
        for index, option in enumerate(chosen):
            now += option.passes[0]
            link = max(now, link) + copies[index]
            done.append(link if copies[index] else 0.0)
            if index >= HOLD:
                now = max(now, done[index - HOLD])
        link, back = now, [0.0] * len(chosen)
        for index in reversed(range(len(chosen))):
            # When backward begins a layer, the tensors of the layer below start to return.
            for layer in (index, index - 1):
                if layer >= 0 and copies[layer] and not back[layer]:
                    link = back[layer] = max(now, link) + copies[layer]
            now = max(now, back[index]) + chosen[index].passes[1]
        return self.seconds + now


def problem(simulations: Mapping[Keep, Simulation], rates: Rates, host_every: int) -> Problem:
    """Return the problem that simulations of uniform plans describe.

    Args: simulations: level -> the step with this level in all layers; host_every: of so many
        neighbours, one layer may keep its tensors in host memory, and its copies overlap with the
        compute of all of them. 0 means that none may.
    """
    count = sum(name.startswith("forward of layer") for name in simulations["all"].phases)
    layers: list[tuple[Option, ...]] = []
    for index in range(count):
        options = []
        for keep, simulation in simulations.items():
            phases = simulation.phases
            forward = phases[f"forward of layer {index}"]
            # Backward has no such phase if nothing in or below the layer needs a gradient.
            backward = phases.get(f"backward of layer {index}", Phase(0))
            before = sum(_kept(phases, i) for i in range(index))
            size = _kept(phases, index)
            beside = max(forward.peak, backward.peak) - before - size
            times = rates.seconds(forward.work), rates.seconds(backward.work)
            options.append(Option(LayerPlan(keep), size, 0, beside, sum(times), times))
            if host_every and index % host_every == 0:
                # Two layers' tensors are on the GPU at a time.
                copy = size / rates.host_bytes
                stalls = (max(0.0, copy - host_every * seconds) for seconds in times)
                moved = LayerPlan(keep, host=True)
                seconds = sum(times) + sum(stalls)
                options.append(Option(moved, 0, size, beside + 2 * size, seconds, times))
        layers.append(tuple(options))
    at_head = max(
        phase.peak - sum(_kept(simulation.phases, i) for i in range(count))
        for simulation in simulations.values()
        for name, phase in simulation.phases.items()
        if "layer" not in name and name != "forward"
    )
    outside = [phase for name, phase in simulations["all"].phases.items() if "layer" not in name]
    seconds = sum(rates.seconds(phase.work) for phase in outside)
    unit = max(1, -(-sum(max(o.kept for o in options) for options in layers) // _STEPS))
    rounded = tuple(
        tuple(replace(option, kept=-(-option.kept // unit) * unit) for option in options)
        for options in layers
    )
    return Problem(rounded, at_head, seconds, rates.host_bytes, unit)


def _kept(phases: dict[str, Phase], index: int) -> int:
    phase = phases[f"forward of layer {index}"]
    return max(0, phase.after - phase.before)


def search(task: Problem, budget: int, host_budget: int = 0) -> list[LayerPlan] | None:
    """Return the fastest choice for each layer that fits, or None if none fits.

    Args: budget: bytes on the GPU; host_budget: bytes in host memory, counted in steps.
    """
    unit, host_unit = task.unit, max(1, -(-host_budget // _HOST_STEPS))
    rows = sum(max(option.kept // unit for option in options) for options in task.layers) + 1
    columns = host_budget // host_unit + 1
    # The least seconds of the layers so far, by the bytes that they keep on the GPU and the host.
    best = np.full((rows, columns), np.inf)
    best[0, 0] = 0.0
    choices: list[np.ndarray[Any, Any]] = []
    for options in task.layers:
        after = np.full_like(best, np.inf)
        choice: np.ndarray[Any, Any] = np.full(best.shape, -1, np.int8)
        for number, option in enumerate(options):
            row, column = option.kept // unit, -(-option.host // host_unit)
            stop = min((budget - option.beside) // unit + 1, rows)
            if stop <= row or column >= columns:
                continue
            seconds = best[: stop - row, : columns - column] + option.seconds
            target = after[row:stop, column:]
            faster = seconds < target
            target[faster] = seconds[faster]
            choice[row:stop, column:][faster] = number
        choices.append(choice)
        best = after
    fitting = best[: max(0, min((budget - task.at_head) // unit + 1, rows))]
    if not np.isfinite(fitting).any():
        return None
    row, column = map(int, np.unravel_index(np.argmin(fitting), fitting.shape))
    chosen = []
    for options, choice in zip(reversed(task.layers), reversed(choices)):
        option = options[choice[row, column]]
        chosen.append(option.plan)
        row -= option.kept // unit
        column -= -(-option.host // host_unit)
    return chosen[::-1]


class Space:
    """The plans that have one size of MLP tiles.

    Args:
        simulate: a function that simulates a step under a plan.
        num_layers: of the model.
        rates: of the device.
        host_budget: bytes of pinned host memory.
        tile: tokens that an MLP handles at once; None for all.
        reserved: whether the bytes that PyTorch's allocator reserves must fit, and not only those
            that tensors take.
    """

    def __init__(
        self,
        simulate: Simulate,
        num_layers: int,
        rates: Rates,
        host_budget: int,
        tile: int | None,
        *,
        reserved: bool = False,
    ) -> None:
        self.reserved = reserved
        self.simulate = cache(simulate)
        self.host_budget, self.tile = host_budget, tile
        self.uniform = {keep: self.plan([LayerPlan(keep)] * num_layers) for keep in KEEPS}
        self.rates = rates

    def plan(self, layers: Sequence[LayerPlan]) -> MemoryPlan:
        """Return the plan with these layers."""
        return MemoryPlan(tuple(layers), mlp_tile=self.tile, host_budget=self.host_budget)

    def peak(self, plan: MemoryPlan) -> int:
        """Return the simulated bytes of a plan that must fit."""
        simulation = self.simulate(plan)
        return max(simulation.peak_bytes, simulation.reserved_bytes if self.reserved else 0)

    @cached_property
    def tasks(self) -> list[Problem]:
        """What a search chooses from. With host memory there are several ways to share the link."""
        simulations = {keep: self.simulate(plan) for keep, plan in self.uniform.items()}
        shares = (1, 2, 3) if self.host_budget else (0,)
        return [problem(simulations, self.rates, host_every) for host_every in shares]

    def time(self, plan: MemoryPlan) -> float:
        """Return the seconds of a step under a plan."""
        return self.tasks[0].time(plan)

    def searched(self, task: Problem, budget: int) -> MemoryPlan | None:
        """Return the plan that a search finds, or None."""
        layers = search(task, budget, self.host_budget)
        return None if layers is None else self.plan(layers)

    @cached_property
    def fixed_plans(self) -> list[MemoryPlan]:
        """Plans that are tried with every budget: the uniform ones, and that of the least bytes."""
        low, high = 0, max(map(self.peak, self.uniform.values()))
        while high - low > max(1, high // 1000):
            middle = (low + high) // 2
            fits = self.searched(self.tasks[0], middle) is not None
            low, high = (low, middle) if fits else (middle, high)
        leanest = self.searched(self.tasks[0], high)
        return [*self.uniform.values(), *([] if leanest is None else [leanest])]

    @cached_property
    def least_bytes(self) -> int:
        """The smallest peak of a plan."""
        return min(map(self.peak, self.fixed_plans))

    def fits(self, budget: int) -> bool:
        """Return whether the plan that recomputes all layers fits, or one with host memory."""
        if self.peak(self.uniform["input"]) <= budget:
            return True
        return self.host_budget > 0 and self.least_bytes <= budget

    def fastest(self, budget: int) -> MemoryPlan | None:
        """Return the fastest plan whose peak is within a budget in bytes, or None."""
        plans = [*self.fixed_plans]
        for task in self.tasks:
            allowed = budget
            for number in range(2 * _ROUNDS):
                plan = self.searched(task, allowed)
                if plan is None:
                    break
                plans.append(plan)
                excess = self.peak(plan) - budget
                if excess <= 0:
                    break
                # Try the next slower plan, so that a larger budget does not find a slower plan
                # than a smaller one. After some plans, pass over those that are too large.
                allowed = task.peak(plan) - (1 if number < _ROUNDS else excess)
        fitting = (plan for plan in plans if self.peak(plan) <= budget)
        return min(fitting, key=self.time, default=None)

    def gains(self, budget: int, seconds: float) -> Iterator[tuple[int, float]]:
        """Yield (further bytes, seconds of a step) where more bytes make the step faster."""
        for more in _MORE:
            plans = (self.searched(task, budget + more * GIB) for task in self.tasks)
            times = [self.time(plan) for plan in plans if plan is not None]
            if times and min(times) < seconds * 0.999:
                seconds = min(times)
                yield more * GIB, seconds


def find_plan(
    spaces: Iterable[Space],
    *,
    budget: int,
    optimizer_bytes: int = 0,
    reserve: float = 0.0,
    batch: int,
    seq: int,
) -> MemoryPlan:
    """Return the fastest plan that fits a budget, with its prediction.

    Args:
        spaces: the plans to choose from, for each size of MLP tiles, without tiles first.
        budget: bytes on the GPU.
        optimizer_bytes: the part of it that the optimizer's states take.
        reserve: the part of it that is left free, as a fraction.
        batch, seq: the shape, for the prediction.
    Raises:
        ConfigError: no plan fits. The message names the least bytes with which one does.
    """
    usable = usable_bytes(budget, optimizer_bytes, reserve)
    best: tuple[Space, MemoryPlan] | None = None
    least = None
    for space in spaces:
        plan = space.fastest(usable)
        if plan is None:
            least = min(space.least_bytes, least or space.least_bytes)
        elif best is None or space.time(plan) < best[0].time(best[1]):
            best = space, plan
        # Tiled MLPs compute gate_up again, as those of this level do.
        if plan and space.time(plan) <= space.time(space.uniform["no_gate_up"]):
            break
    if best is None:
        needed = least_budget(least or 0, optimizer_bytes, reserve)
        raise ConfigError(
            f"memory plan: a budget of {budget} bytes ({budget / GIB:.2f} GiB) is too small for "
            f"batch {batch} and seq {seq}: at least {needed} bytes ({needed / GIB:.2f} GiB) are "
            "needed; raise the budget, or lower batch or seq"
        )
    space, plan = best
    simulation, seconds = space.simulate(plan), space.time(plan)
    prediction = Prediction(
        batch=batch,
        seq=seq,
        budget=budget,
        peak_bytes=simulation.peak_bytes + optimizer_bytes,
        reserved_bytes=simulation.reserved_bytes + optimizer_bytes,
        optimizer_bytes=optimizer_bytes,
        reserve_bytes=budget - usable - optimizer_bytes,
        weight_bytes=simulation.weight_bytes,
        grad_bytes=simulation.grad_bytes,
        host_bytes=simulation.host_bytes,
        seconds=seconds,
        gains=tuple(space.gains(usable, seconds)),
    )
    return replace(plan, prediction=prediction)


def usable_bytes(budget: int, optimizer_bytes: int, reserve: float) -> int:
    """Return what a budget leaves for forward and backward."""
    return budget - int(budget * reserve) - optimizer_bytes


def least_budget(peak_bytes: int, optimizer_bytes: int, reserve: float) -> int:
    """Return the smallest budget that leaves `peak_bytes` for forward and backward."""
    budget = int((peak_bytes + optimizer_bytes) / (1 - reserve))
    while usable_bytes(budget, optimizer_bytes, reserve) < peak_bytes:
        budget += 1
    while usable_bytes(budget - 1, optimizer_bytes, reserve) >= peak_bytes:
        budget -= 1
    return budget


def largest(fits: Callable[[int], bool], start: int = 1) -> int:
    """Return the largest positive number for which `fits` is true, or 0, within 2%.

    `fits` is true up to some number, and false beyond it.
    """
    if not fits(start):
        return largest(fits, 1) if start > 1 else 0
    low, high = start, start * 2
    while fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
