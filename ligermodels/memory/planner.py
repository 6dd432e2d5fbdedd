"""Find the fastest memory plan that fits a budget.

The step is simulated with each level in all layers. This gives what each layer keeps, what its
backward needs besides, and its work, which `Rates` turn into seconds. While backward is in layer i,
the kept tensors of the layers 0 to i and the gradients of the later layers exist. The fastest
choice under these constraints, one for each layer, is found exactly by dynamic programming over the
layers. The chosen plan is then simulated as a whole. If its peak exceeds the budget, the search is
repeated with a budget that is smaller by the excess.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import KEEPS
from ligermodels.memory.plan import LayerPlan, MemoryPlan, Prediction
from ligermodels.memory.rates import Rates
from ligermodels.memory.simulate import Phase, Simulation

_STEPS = 8192  # into how many steps the search divides the budget
_HOST_STEPS = 64
_ROUNDS = 8
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
GIB = 2**30

Simulate = Callable[[MemoryPlan], Simulation]


def parse_bytes(value: int | str, name: str) -> int:
    """Return a number of bytes from an int or a text such as "40GiB" or "80 GB".

    Raises:
        ConfigError: the value is not a number of bytes.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigError(
        f'{name}={value!r}: expected a number of bytes, such as 42949672960, "40GiB" or "80GB"'
    )


@dataclass(frozen=True)
class _Option:
    """One level in one layer."""

    plan: LayerPlan
    kept: int  # bytes on the GPU from the layer's forward to its backward
    host: int  # bytes in host memory
    transient: int  # bytes that the layer's backward needs besides what exists when it begins
    seconds: float  # of forward and backward


@dataclass(frozen=True)
class _Layer:
    others: int  # bytes that exist when the layer's backward begins, without any kept tensors
    options: tuple[_Option, ...]


@dataclass(frozen=True)
class Problem:
    """What a search chooses from: the options of each layer, and the constraints."""

    layers: tuple[_Layer, ...]
    at_head: int  # bytes at the peak of the head, without any kept tensors
    fixed_bytes: int  # optimizer states and the reserve, which the simulation does not count
    fixed_seconds: float  # embedding, head and final norm


def problem(
    simulations: dict[str, Simulation], rates: Rates, fixed_bytes: int, *, host: bool
) -> Problem:
    """Return the problem that simulations of uniform plans describe.

    Args: simulations: level -> the step with this level in all layers; host: whether tensors may
        also be kept in host memory.
    """
    first = simulations["all"]
    count = sum(name.startswith("forward of layer") for name in first.phases)
    layers = []
    for index in range(count):
        others, options = 0, []
        for keep in KEEPS:
            phases = simulations[keep].phases
            kept = [_kept(phases, i) for i in range(index + 1)]
            back = phases[f"backward of layer {index}"]
            others = max(others, back.before - sum(kept))
            forward_s = rates.seconds(phases[f"forward of layer {index}"].work)
            backward_s = rates.seconds(back.work)
            transient, size = back.peak - back.before, kept[-1]
            seconds = forward_s + backward_s
            options.append(_Option(LayerPlan(keep), size, 0, transient, seconds))
            if host:
                # Copies overlap with the compute of the layer before or after.
                copy = size / rates.host_bytes
                stall = max(0.0, copy - forward_s) + max(0.0, copy - backward_s)
                options.append(
                    _Option(LayerPlan(keep, True), 0, size, transient + 2 * size, seconds + stall)
                )
        layers.append(_Layer(others, tuple(options)))
    at_head = max(
        simulation.phases["head"].peak - sum(_kept(simulation.phases, i) for i in range(count))
        for simulation in simulations.values()
    )
    elsewhere = [p for name, p in first.phases.items() if "layer" not in name]
    return Problem(
        tuple(layers), at_head, fixed_bytes, sum(rates.seconds(phase.work) for phase in elsewhere)
    )


def _kept(phases: dict[str, Phase], index: int) -> int:
    phase = phases[f"forward of layer {index}"]
    return phase.after - phase.before


def search(task: Problem, budget: int, host_budget: int) -> tuple[list[LayerPlan], float] | None:
    """Return the fastest choice for each layer and the seconds of a step, or None if none fits.

    The state is (bytes kept by the layers so far, bytes in host memory). Bytes are rounded up to
    steps of the budget.
    """
    budget -= task.fixed_bytes
    if budget <= 0:
        return None
    unit = max(1, -(-budget // _STEPS))
    host_unit = max(1, -(-host_budget // _HOST_STEPS))
    columns = host_budget // host_unit + 1 if host_budget else 1
    best = np.full((_STEPS + 1, columns), np.inf)
    best[0, 0] = 0.0
    choices: list[np.ndarray] = []
    for layer in task.layers:
        after = np.full_like(best, np.inf)
        choice = np.full(best.shape, -1, np.int8)
        for number, option in enumerate(layer.options):
            rows = -(-option.kept // unit)
            to_host = -(-option.host // host_unit)
            limit = (budget - layer.others - option.transient) // unit  # on the kept bytes so far
            last = min(limit, _STEPS)
            if last < rows or to_host >= columns:
                continue
            reached = best[: last + 1 - rows, : columns - to_host] + option.seconds
            target = after[rows : last + 1, to_host:]
            better = reached < target
            target[better] = reached[better]
            choice[rows : last + 1, to_host:][better] = number
        choices.append(choice)
        best = after
    limit = min((budget - task.at_head) // unit, _STEPS)
    if limit < 0 or not np.isfinite(best[: limit + 1]).any():
        return None
    row, column = np.unravel_index(np.argmin(best[: limit + 1]), best[: limit + 1].shape)
    seconds = float(best[row, column]) + task.fixed_seconds
    chosen: list[LayerPlan] = []
    for layer, choice in zip(reversed(task.layers), reversed(choices)):
        option = layer.options[choice[row, column]]
        chosen.append(option.plan)
        row -= -(-option.kept // unit)
        column -= -(-option.host // host_unit)
    return chosen[::-1], seconds


def find_plan(
    simulate: Simulate,
    num_layers: int,
    rates: Rates,
    *,
    budget: int,
    host_budget: int = 0,
    fixed_bytes: int = 0,
    tiles: Sequence[int] = (),
    batch: int,
    seq: int,
) -> MemoryPlan:
    """Return the fastest plan whose simulated peak fits the budget, with its prediction.

    Args:
        simulate: a function that simulates a step under a plan.
        budget: bytes on the GPU for everything, `fixed_bytes` included.
        host_budget: bytes of pinned host memory.
        fixed_bytes: optimizer states and the reserve.
        tiles: sizes of MLP tiles to try if no plan without tiles fits, from the largest.
        batch, seq: the shape, for the prediction.
    Raises:
        ConfigError: no plan fits. The message names the least bytes with which one does.
    """
    least = None
    for tile in (None, *tiles):
        options = {"mlp_tile": tile, "host_budget": host_budget}
        uniform = {
            keep: simulate(MemoryPlan.uniform(num_layers, keep, **options)) for keep in KEEPS
        }
        task = problem(uniform, rates, fixed_bytes, host=host_budget > 0)
        allowed = budget
        for _ in range(_ROUNDS):
            found = search(task, allowed, host_budget)
            if found is None:
                break
            layers, seconds = found
            plan = MemoryPlan.of(layers, **options)
            simulation = simulate(plan)
            peak = simulation.peak_bytes + fixed_bytes
            if peak <= budget:
                return replace(
                    plan,
                    prediction=Prediction(
                        batch=batch,
                        seq=seq,
                        budget=budget,
                        peak_bytes=peak,
                        fixed_bytes=fixed_bytes,
                        weight_bytes=simulation.weight_bytes,
                        grad_bytes=simulation.grad_bytes,
                        host_bytes=simulation.host_bytes,
                        seconds=seconds,
                        gains=_gains(task, budget, host_budget, seconds),
                    ),
                )
            allowed -= peak - budget
        smallest = uniform["input"].peak_bytes + fixed_bytes
        least = smallest if least is None else min(least, smallest)
    raise ConfigError(
        f"memory plan: a budget of {budget / GIB:.2f} GiB is too small for batch {batch} and seq "
        f"{seq}: the plan that needs the least takes {least} bytes ({(least or 0) / GIB:.2f} GiB); "
        "raise the budget, or lower batch or seq"
    )


def _gains(
    task: Problem, budget: int, host_budget: int, seconds: float
) -> tuple[tuple[int, float], ...]:
    """Return (further bytes, seconds of a step) for budgets with which the step is faster."""
    gains = []
    for more in (1, 2, 4, 8, 16, 32, 64):
        found = search(task, budget + more * GIB, host_budget)
        if found is not None and found[1] < seconds * 0.999:
            seconds = found[1]
            gains.append((more * GIB, seconds))
    return tuple(gains)


def largest(fits: Callable[[int], bool], start: int = 1) -> int:
    """Return the largest positive number for which `fits` is true, or 0. It is monotonic."""
    if not fits(start):
        return 0
    low, high = start, start * 2
    while fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
