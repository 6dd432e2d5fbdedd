"""Find the fastest memory plan that fits a budget.

The step is simulated with each level in all layers, and with tiled MLPs. This gives what each layer
keeps, what exists besides at the worst time of its forward and backward, and its work, which
`Rates` turn into seconds. While a layer runs, only the tensors that it and the layers before it
keep exist. The fastest choice under these constraints, one for each layer, is found exactly by
dynamic programming over the layers. The chosen plan is then simulated as a whole. If its peak
exceeds the budget, the next slower plan is tried.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import KEEPS, Keep
from ligermodels.memory.byte_sizes import GIB
from ligermodels.memory.offload import HOLD
from ligermodels.memory.plan import LayerPlan, MemoryPlan, Prediction
from ligermodels.memory.rates import Rates
from ligermodels.memory.simulate import Phase, Simulation

# The search counts kept bytes, and bytes in host memory, in this many steps.
_STEPS, _HOST_STEPS = 8192, 32
_ROUNDS = 8
_TILED_ALSO: tuple[Keep, ...] = ("no_gate_up", "attention")
_MORE = (1, 2, 4, 8, 16, 32, 64)  # GiB

Simulate = Callable[[MemoryPlan], Simulation]


@dataclass(frozen=True)
class Option:
    """One choice for one layer.

    Attributes:
        plan: the choice.
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
            option = _choice(options, layer)
            kept += option.kept
            peak = max(peak, kept + option.beside)
        return max(peak, kept + self.at_head)

    def time(self, plan: MemoryPlan) -> float:
        """Return the seconds of a step under a plan, in which each direction copies in turn."""
        chosen = [
            _choice(options, replace(layer, host=False))
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


def _choice(options: Sequence[Option], plan: LayerPlan) -> Option:
    return next(option for option in options if option.plan == plan)


def problem(
    simulations: Mapping[LayerPlan, Simulation], rates: Rates, host_every: int = 0
) -> Problem:
    """Return the problem that simulations of uniform plans describe.

    Args: simulations: the plan of every layer -> the step, for each level, and for "input" with
        each size of tiles. Where gate_up is computed again, tiles make the same difference.
        host_every: of so many neighbours, one layer may keep its tensors in host memory, and its
        copies overlap with the compute of all of them. 0 means that none may.
    """
    whole = LayerPlan("input")
    count = sum(name.startswith("forward of layer") for name in simulations[whole].phases)
    layers: list[tuple[Option, ...]] = []
    for index in range(count):
        found = {plan: _option(plan, s.phases, index, rates) for plan, s in simulations.items()}
        for other, tiled in product(map(LayerPlan, _TILED_ALSO), list(found)):
            if tiled.tile is not None:
                plan = replace(other, tile=tiled.tile)
                found[plan] = _changed(found[other], plan, found[whole], found[tiled])
        options = list(found.values())
        if host_every and index % host_every == 0:
            for option in found.values():
                copy = option.kept / rates.host_bytes
                stalls = (max(0.0, copy - host_every * seconds) for seconds in option.passes)
                moved = replace(
                    option,
                    plan=replace(option.plan, host=True),
                    kept=0,
                    host=option.kept,
                    # Two layers' tensors are on the GPU at a time.
                    beside=option.beside + 2 * option.kept,
                    seconds=option.seconds + sum(stalls),
                )
                options.append(moved)
        layers.append(tuple(options))
    at_head = max(
        phase.peak - sum(_kept(simulation.phases, i) for i in range(count))
        for simulation in simulations.values()
        for name, phase in simulation.phases.items()
        if "layer" not in name and name != "forward"
    )
    outside = [phase for name, phase in simulations[whole].phases.items() if "layer" not in name]
    seconds = sum(rates.seconds(phase.work) for phase in outside)
    unit = max(1, -(-sum(max(o.kept for o in options) for options in layers) // _STEPS))
    rounded = tuple(
        tuple(replace(option, kept=-(-option.kept // unit) * unit) for option in options)
        for options in layers
    )
    return Problem(rounded, at_head, seconds, rates.host_bytes, unit)


def _option(plan: LayerPlan, phases: dict[str, Phase], index: int, rates: Rates) -> Option:
    """Return what a simulation says of a layer."""
    forward = phases[f"forward of layer {index}"]
    # Backward has no such phase if nothing in or below the layer needs a gradient.
    backward = phases.get(f"backward of layer {index}", Phase(0))
    kept = _kept(phases, index)
    beside = max(forward.peak, backward.peak) - sum(_kept(phases, i) for i in range(index + 1))
    passes = rates.seconds(forward.work), rates.seconds(backward.work)
    return Option(plan, kept, 0, beside, sum(passes), passes)


def _changed(option: Option, plan: LayerPlan, before: Option, after: Option) -> Option:
    """Return an option that differs from another one as `after` does from `before`."""
    forward, backward = (
        seconds + new - old for seconds, new, old in zip(option.passes, after.passes, before.passes)
    )
    beside = option.beside + after.beside - before.beside
    return Option(plan, option.kept, 0, beside, forward + backward, (forward, backward))


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
    useful = [_useful(options) for options in task.layers]
    # The least seconds of the layers so far, by the bytes that they keep on the GPU and the host.
    best = np.full((rows, columns), np.inf)
    best[0, 0] = 0.0
    choices: list[np.ndarray[Any, Any]] = []
    for options in useful:
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
    for options, choice in zip(reversed(useful), reversed(choices)):
        option = options[choice[row, column]]
        chosen.append(option.plan)
        row -= option.kept // unit
        column -= -(-option.host // host_unit)
    return chosen[::-1]


def _useful(options: Sequence[Option]) -> list[Option]:
    """Return the options to which no other one is preferable in every respect."""

    def costs(option: Option) -> tuple[float, ...]:
        return option.seconds, option.kept, option.beside, option.host

    useful: list[Option] = []
    for option in sorted(options, key=costs):
        if not any(
            all(a <= b for a, b in zip(costs(other), costs(option), strict=True))
            for other in useful
        ):
            useful.append(option)
    return useful


class Space:
    """The plans of a step.

    Args:
        simulate: a function that simulates a step under a plan.
        num_layers: of the model.
        rates: of the device.
        host_budget: bytes of pinned host memory.
        tiles: tokens that a tiled MLP may handle at once.
        reserved: whether the bytes that PyTorch's allocator reserves must fit, and not only those
            that tensors take.
    """

    def __init__(
        self,
        simulate: Simulate,
        num_layers: int,
        rates: Rates,
        host_budget: int,
        tiles: Sequence[int] = (),
        *,
        reserved: bool = False,
    ) -> None:
        self.reserved = reserved
        self.simulate = cache(simulate)
        self.host_budget = host_budget
        choices = [LayerPlan(keep) for keep in KEEPS]
        choices += [LayerPlan("input", tile=tile) for tile in tiles]
        self.uniform = {choice: self.plan([choice] * num_layers) for choice in choices}
        self.rates = rates

    def plan(self, layers: Sequence[LayerPlan]) -> MemoryPlan:
        """Return the plan with these layers."""
        return MemoryPlan(tuple(layers), host_budget=self.host_budget)

    def peak(self, plan: MemoryPlan) -> int:
        """Return the simulated bytes of a plan that must fit."""
        simulation = self.simulate(plan)
        return max(simulation.peak_bytes, simulation.reserved_bytes if self.reserved else 0)

    @cached_property
    def tasks(self) -> list[Problem]:
        """What a search chooses from. With host memory there are several ways to share the link."""
        simulations = {choice: self.simulate(plan) for choice, plan in self.uniform.items()}
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
        # Small tiles take the least memory.
        if any(self.peak(plan) <= budget for plan in reversed(self.uniform.values())):
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
    space: Space,
    *,
    budget: int,
    optimizer_bytes: int = 0,
    reserve: float = 0.0,
    batch: int,
    seq: int,
) -> MemoryPlan:
    """Return the fastest plan that fits a budget, with its prediction.

    Args:
        space: the plans to choose from.
        budget: bytes on the GPU.
        optimizer_bytes: the part of it that the optimizer's states take.
        reserve: the part of it that is left free, as a fraction.
        batch, seq: the shape, for the prediction.
    Raises:
        ConfigError: no plan fits. The message names the least bytes with which one does.
    """
    usable = usable_bytes(budget, optimizer_bytes, reserve)
    plan = space.fastest(usable)
    if plan is None:
        needed = least_budget(space.least_bytes, optimizer_bytes, reserve)
        raise ConfigError(
            f"memory plan: a budget of {budget} bytes ({budget / GIB:.2f} GiB) is too small for "
            f"batch {batch} and seq {seq}: at least {needed} bytes ({needed / GIB:.2f} GiB) are "
            "needed; raise the budget, or lower batch or seq"
        )
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
