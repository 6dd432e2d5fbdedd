"""Find the fastest memory plan that fits a budget.

The step is simulated with each checkpointing policy in all layers, and with tiled MLPs. This gives
the bytes that each layer keeps, the most other bytes that exist during its forward and backward,
and its work, from which `Rates` gives seconds. While a layer runs, only the tensors that it and the
layers before it keep exist. The fastest choice under these constraints, one for each layer, is
found exactly by dynamic programming over the layers. With host memory, a plan is improved step by
step instead, because copies wait for each other. The plan is then simulated as a whole. If it takes
more bytes than the search counted, the search is repeated with a budget that is smaller by the
difference.

The last dimension of the arrays of a timeline is the layers. Earlier dimensions hold plans that are
compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import POLICIES, CheckpointingPolicy
from ligermodels.memory.byte_sizes import GIB, MIB
from ligermodels.memory.offload import HOLD
from ligermodels.memory.plan import LayerPlan, MemoryPlan, Prediction
from ligermodels.memory.rates import Rates, Work
from ligermodels.memory.simulate import OPTIMIZER_STEP, Simulation
from ligermodels.memory.tracker import Phase

Array = np.ndarray[Any, Any]

# A change must make the score smaller by this factor.
_LESS = 1 - 1e-4


def layer_seconds(forward: Array, backward: Array, copies: Array) -> Array:
    """Return the seconds of the layers, (...), if each direction has one copy at a time.

    Forward waits when a layer ends whose copies hold memory too long, and backward for the tensors
    that it needs; both are those of `Offloader`.

    Args: forward, backward: seconds of the passes; copies: seconds of the copies to host memory,
        which take as long on the way back. All are (..., layers).
    """
    count = copies.shape[-1]
    moves = copies > 0
    now = np.zeros(copies.shape[:-1])
    link = np.zeros_like(now)
    done = np.zeros_like(copies)
    for index in range(count):
        now = now + forward[..., index]
        end = np.maximum(now, link) + copies[..., index]
        link = np.where(moves[..., index], end, link)
        done[..., index] = np.where(moves[..., index], end, 0.0)
        if index >= HOLD:
            now = np.maximum(now, done[..., index - HOLD])
    link, ready = now, np.zeros_like(copies)
    for index in reversed(range(count)):
        # When backward begins a layer, the tensors of the layer below start to return.
        for layer in (index, index - 1) if index == count - 1 else (index - 1,):
            if layer >= 0:
                end = np.maximum(now, link) + copies[..., layer]
                link = np.where(moves[..., layer], end, link)
                ready[..., layer] = np.where(moves[..., layer], end, 0.0)
        now = np.maximum(now, ready[..., index]) + backward[..., index]
    return now


@dataclass(frozen=True)
class Choices:
    """The costs of the choices for all layers, from which a search chooses.

    Attributes:
        plans: the choices. Their kept tensors may be in host memory.
        kept: bytes from a layer's forward to its backward, (choices, layers).
        beside: the most bytes that exist, while a layer runs forward or backward, besides what it
            and the layers before it keep, (choices, layers).
        forward, backward: seconds of the passes, (choices, layers).
        at_head: the most bytes that exist between the layers' forward and their backward, besides
            what the layers keep.
        host_bytes: bytes/s to or from host memory.
        outside: seconds of the step outside the layers.
        unit: all kept bytes are multiples of it.
    """

    plans: Sequence[LayerPlan]
    kept: Array
    beside: Array
    forward: Array
    backward: Array
    at_head: int
    host_bytes: float = 1.0
    outside: float = 0.0
    unit: int = 1

    def only(self, plans: Sequence[LayerPlan]) -> "Choices":
        """Return some choices, which may now be in host memory."""
        at = [self.plans.index(replace(plan, host=False)) for plan in plans]
        costs = {
            name: getattr(self, name)[at] for name in ("kept", "beside", "forward", "backward")
        }
        return replace(self, plans=plans, **costs)

    def kept_by(self, layers: Sequence[LayerPlan]) -> tuple[int, ...]:
        """Return the bytes that each layer keeps."""
        at = [self.plans.index(replace(layer, host=False)) for layer in layers]
        return tuple(self.kept[at, np.arange(len(at))].tolist())

    def step(self, layers: Sequence[LayerPlan]) -> tuple[float, int]:
        """Return the seconds of a step and its peak in bytes, as a search counts them."""
        choices = self.only(list(dict.fromkeys(layers)))
        seconds, peak, _ = choices.costs(np.array([*map(choices.plans.index, layers)]))
        return self.outside + float(seconds), int(peak)

    def costs(self, plans: Array) -> tuple[Array, Array, Array]:
        """Return the seconds of the layers, the peak and the bytes in host memory, all (...).

        Args: plans: the numbers of the choices, (..., layers).
        """
        layers = np.arange(plans.shape[-1])
        kept, host = self.kept[plans, layers], np.array([x.host for x in self.plans])[plans]
        moved = np.where(host, kept, 0)
        here = (kept - moved).cumsum(-1)
        # In backward the tensors of a layer and of the one below are on the GPU.
        returned = moved.copy()
        returned[..., 1:] += moved[..., :-1]
        running = (here + returned + self.beside[plans, layers]).max(-1)
        # The tensors of the last layers do not leave it before backward.
        at_head = here[..., -1] + moved[..., -HOLD:].sum(-1) + self.at_head
        seconds = layer_seconds(
            self.forward[plans, layers], self.backward[plans, layers], moved / self.host_bytes
        )
        return seconds, np.maximum(running, at_head), moved.sum(-1)

    def scores(self, plans: Array, budget: int, host_budget: int) -> Array:
        """Return the seconds, to which each byte that exceeds a budget adds a second."""
        seconds, peak, host = self.costs(plans)
        return seconds + np.maximum(peak - budget, 0) + np.maximum(host - host_budget, 0)

    def improved(self, plan: Array, budget: int, host_budget: int, *, pairs: bool = True) -> Array:
        """Change one layer at a time, or with `pairs` two, as long as the plan becomes faster.

        The plan that is given may exceed the budgets, and is then first made smaller.

        Args: plan: the numbers of the choices, (layers,); budget, host_budget: bytes.
        """
        count, layers = self.kept.shape
        what, where = (x.ravel() for x in np.indices((count, layers)))
        first, second = np.triu_indices(len(where), 1)
        apart = where[first] != where[second]
        # Pairs take much longer, so they are tried where no single change helps.
        kinds: list[tuple[Array, ...]] = [(np.arange(len(where)),)]
        kinds += [(first[apart], second[apart])] * pairs

        def changed(moves: tuple[Array, ...]) -> tuple[float, Array]:
            plans = np.repeat(plan[None], len(moves[0]), 0)
            for move in moves:
                plans[np.arange(len(plans)), where[move]] = what[move]
            found = self.scores(plans, budget, host_budget)
            return float(found.min()), plans[found.argmin()]

        score = float(self.scores(plan, budget, host_budget))
        while True:
            better = (found for found in map(changed, kinds) if found[0] < score * _LESS)
            found = next(better, None)
            if found is None:
                return plan
            score, plan = found


# The search counts kept bytes in this many steps.
_STEPS = 8192
_ROUNDS = 5
_TILED_ALSO: tuple[CheckpointingPolicy, ...] = ("no_gate_up", "attention")
_MORE = (1, 2, 4, 8, 16, 32, 64)  # GiB

Simulate = Callable[[MemoryPlan], Simulation]


def choices_of(simulations: Mapping[LayerPlan, Simulation], rates: Rates) -> Choices:
    """Return the choices that simulations of uniform plans describe.

    Args: simulations: the plan of every layer -> the step, for each policy, and for "input" with
        each size of tiles. Where gate_up is computed again, tiles make the same difference.
    """
    found = {plan: _layer_costs(step, rates)[:4] for plan, step in simulations.items()}
    whole = LayerPlan("input")
    for policy, tiled in product(_TILED_ALSO, list(found)):
        if tiled.tile is not None:
            other = replace(tiled, policy=policy, tile=None)
            kept, *rest = zip(found[other], found[tiled], found[replace(tiled, tile=None)])
            changed = (a + b - c for a, b, c in rest)
            found[replace(other, tile=tiled.tile)] = (kept[0], *changed)
    at_head = max(
        phase.peak - int(found[plan][0].sum())
        for plan, simulation in simulations.items()
        for name, phase in simulation.phases.items()
        if "layer" not in name and name not in ("forward", OPTIMIZER_STEP)
    )
    kept, beside, forward, backward = (np.array(costs) for costs in zip(*found.values()))
    unit = max(1, -(-int(kept.max(0).sum()) // _STEPS))
    outside = rates.seconds(_outside(simulations[whole]))
    rounded = -(-kept // unit) * unit
    others = at_head, rates.host_bytes, outside, unit
    return Choices([*found], rounded, beside, forward, backward, *others)


def _outside(simulation: Simulation) -> Work:
    """Return the work outside the layers."""
    works = (phase.work for name, phase in simulation.phases.items() if "layer" not in name)
    return sum(works, Work())


def _forward(simulation: Simulation) -> list[Phase]:
    """Return the forward of each layer."""
    count = sum(name.startswith("forward of layer") for name in simulation.phases)
    return [simulation.phases[f"forward of layer {i}"] for i in range(count)]


def _kept(phase: Phase) -> int:
    """Return the bytes that a layer keeps after its forward."""
    return max(0, phase.after - phase.before)


def _layer_costs(simulation: Simulation, rates: Rates) -> tuple[Array, ...]:
    """Return the first four costs of `Choices` for each layer, and the seconds of its copies."""
    forward = _forward(simulation)
    # Backward has no such phase if nothing in or below the layer needs a gradient.
    names = (f"backward of layer {i}" for i in range(len(forward)))
    backward = [simulation.phases.get(name, Phase(0)) for name in names]
    kept = np.array([*map(_kept, forward)])
    peaks = np.array([max(a.peak, b.peak) for a, b in zip(forward, backward)])
    seconds = [np.array([rates.seconds(x.work) for x in each]) for each in (forward, backward)]
    copied = np.array([phase.work.to_host_bytes for phase in forward])
    return kept, peaks - kept.cumsum(), *seconds, copied / rates.host_bytes


def step_seconds(simulation: Simulation, rates: Rates) -> float:
    """Return the seconds of a step, and of the copies to host memory that it waits for."""
    _, _, *costs = _layer_costs(simulation, rates)
    return float(layer_seconds(*costs)) + rates.seconds(_outside(simulation))


def search(task: Choices, budget: int) -> list[LayerPlan] | None:
    """Return the fastest choice for each layer that fits `budget` bytes, or None if none fits."""
    steps: Array = task.kept // task.unit
    seconds = task.forward + task.backward
    stops: Array = (budget - task.beside) // task.unit + 1
    rows = int(steps.max(0).sum()) + 1
    # The least seconds of the layers so far, by the bytes that they keep.
    best = np.full(rows, np.inf)
    best[0] = 0.0
    chosen_at: list[Array] = []
    for layer in range(steps.shape[1]):
        after = np.full_like(best, np.inf)
        choice: Array = np.full(best.shape, -1, np.int8)
        costs = task.beside[:, layer], steps[:, layer], seconds[:, layer]
        for number in np.lexsort(costs):  # of equally fast plans, the one that keeps less
            row, stop = int(steps[number, layer]), min(int(stops[number, layer]), rows)
            if stop <= row:
                continue
            times = best[: stop - row] + seconds[number, layer]
            target = after[row:stop]
            faster = times < target
            target[faster] = times[faster]
            choice[row:stop][faster] = number
        chosen_at.append(choice)
        best = after
    fitting = best[: max(0, min((budget - task.at_head) // task.unit + 1, rows))]
    if not np.isfinite(fitting).any():
        return None
    row = int(fitting.argmin())
    chosen = []
    for layer in reversed(range(len(chosen_at))):
        number = int(chosen_at[layer][row])
        chosen.append(task.plans[number])
        row -= int(steps[number, layer])
    return chosen[::-1]


@dataclass(eq=False)
class Space:
    """The plans of a step.

    Attributes:
        simulate: a function that simulates a step under a plan.
        num_layers: of the model.
        device_rates: a function that returns the rates of the device, which takes long to measure.
        host_budget: bytes of pinned host memory.
        tiles: tokens that a tiled MLP may handle at once, from many to few.
        reserved: whether the bytes that PyTorch's allocator reserves must fit, and not only those
            that tensors take.
        head_chunk: tokens that the loss head handles at once; None means its default.
        float8: whether layers may keep tensors in float8.
    """

    simulate: Simulate
    num_layers: int
    device_rates: Callable[[], Rates]
    host_budget: int
    tiles: Sequence[int] = ()
    reserved: bool = False
    head_chunk: int | None = None
    float8: bool = False

    def __post_init__(self) -> None:
        self.simulate = cache(self.simulate)
        self.uses_host = self.host_budget >= MIB
        choices = [LayerPlan(policy) for policy in POLICIES]
        choices += [LayerPlan("input", tile=tile) for tile in self.tiles]
        if self.float8:
            choices += [replace(choice, float8=True) for choice in choices]
        self.uniform = {choice: self.plan([choice] * self.num_layers) for choice in choices}
        # Every layer keeps as little as it can.
        self.smallest = self.plan([replace(choices[-1], host=self.uses_host)] * self.num_layers)

    def plan(self, layers: Sequence[LayerPlan]) -> MemoryPlan:
        """Return the plan with these layers."""
        return MemoryPlan(tuple(layers), self.host_budget, self.head_chunk)

    def needs(self, plan: MemoryPlan) -> tuple[int, int]:
        """Return the bytes of a plan, and those that must be free besides.

        Free memory may lie in pieces none of which holds the largest block. Then one block more
        is reserved than the simulation says.
        """
        found = self.simulate(plan)
        if not self.reserved:
            return found.peak_bytes, 0
        return found.reserved_bytes, found.largest_bytes

    def peak(self, plan: MemoryPlan, slack: int = 0) -> int:
        """Return the bytes of a plan that must fit beside `slack` bytes that are left free."""
        size, free = self.needs(plan)
        return size + max(0, free - slack)

    @cached_property
    def rates(self) -> Rates:
        """The rates of the device in such a step."""
        found = self.simulate(self.uniform[LayerPlan()])
        return self.device_rates().in_step(found.work("forward") + found.work("backward"))

    def time(self, plan: MemoryPlan) -> float:
        """Return the seconds of a step under a plan."""
        return step_seconds(self.simulate(plan), self.rates)

    @cached_property
    def task(self) -> Choices:
        """The options of all layers."""
        simulations = {choice: self.simulate(plan) for choice, plan in self.uniform.items()}
        return choices_of(simulations, self.rates)

    def searched(self, budget: int) -> MemoryPlan | None:
        """Return the plan that a search finds, or None."""
        layers = search(self.task, budget)
        if self.uses_host:
            layers = self._with_host(layers or self._least_layers, budget)
        if layers is None or self.task.step(layers)[1] > budget:
            return None
        return self.plan(layers)

    def _with_host(self, layers: Sequence[LayerPlan], budget: int) -> list[LayerPlan]:
        """Return a plan with host memory, or the given one if no better one is found."""
        here = list(dict.fromkeys([*map(LayerPlan, POLICIES), *layers]))
        plans = [replace(plan, host=host) for host in (False, True) for plan in here]
        choices = self.task.only(plans)
        # A search ends where no small change helps, so it begins in several places.
        starts = [[LayerPlan()] * len(layers), layers]
        starts += [
            [replace(plan, host=True)] * len(layers) for plan in map(LayerPlan, POLICIES[:2])
        ]
        budgets = budget, self.host_budget
        found = [
            choices.improved(np.array([*map(plans.index, start)]), *budgets, pairs=False)
            for start in starts
        ]
        best = found[choices.scores(np.stack(found), *budgets).argmin()]
        return [plans[number] for number in choices.improved(best, *budgets)]

    @cached_property
    def _least_layers(self) -> list[LayerPlan]:
        """The plans of the layers that need the least bytes, without host memory."""
        low, high = 0, max(map(self.peak, self.uniform.values()))
        while search(self.task, high) is None:
            low, high = high, 2 * high
        while high - low > max(1, high // 1000):
            middle = (low + high) // 2
            low, high = (middle, high) if search(self.task, middle) is None else (low, middle)
        found = search(self.task, high)
        assert found is not None
        return found

    @cached_property
    def least_plans(self) -> list[MemoryPlan]:
        """Plans that are tried with every budget: uniform ones, and that of the least bytes."""
        layers = self._least_layers
        if self.uses_host:
            layers = self._with_host(layers, 0)
        return [*self.uniform.values(), self.smallest, self.plan(layers)]

    def least_budget(self, budget: "Budget") -> int:
        """Return the smallest number of bytes with which a plan fits; see `find_plan`."""
        return min(budget.least(*self.needs(plan)) for plan in self.least_plans)

    def fastest(self, budget: int, slack: int = 0) -> MemoryPlan | None:
        """Return the fastest plan whose peak fits a budget in bytes beside `slack`, or None."""
        whole = self.uniform[LayerPlan()]
        if self.peak(whole, slack) <= budget:
            return whole
        fitting: list[MemoryPlan] = []
        low, high, allowed = 0, budget, budget
        for _ in range(_ROUNDS):
            plan = self.searched(allowed)
            if plan is None:
                low = allowed
            elif (excess := self.peak(plan, slack) - budget) <= 0:
                fitting.append(plan)
                low = allowed
            else:
                high = self.task.step(plan.layers)[1]
            if high - low <= budget // 400 or low == budget:
                break
            # The plan may need more than the search counts, so the search gets as much less.
            allowed = (low + high) // 2 if low else max(high - excess, 1)
        if not fitting:
            fitting = [plan for plan in self.least_plans if self.peak(plan, slack) <= budget]
        return min(fitting, key=self.time, default=None)

    def gains(self, plan: MemoryPlan) -> Iterator[tuple[int, float]]:
        """Yield (further bytes, seconds of a step) where more bytes make a plan's step faster."""
        if plan == self.uniform[LayerPlan()]:
            return
        seconds, peak = self.task.step(plan.layers)
        for more in _MORE:
            found = self.searched(peak + more * GIB)
            assert found is not None
            faster, _ = self.task.step(found.layers)
            if faster < seconds * 0.999:
                seconds = faster
                yield more * GIB, seconds


@dataclass(frozen=True)
class Budget:
    """The bytes of a GPU for a step.

    Attributes:
        total: all of them.
        optimizer_bytes: the part of it that the optimizer's states take.
        reserve: the part of it that is left free, as a fraction.
    """

    total: int
    optimizer_bytes: int = 0
    reserve: float = 0.0

    @property
    def slack(self) -> int:
        """The bytes that are left free."""
        return int(self.total * self.reserve)

    @property
    def usable(self) -> int:
        """What is left for forward and backward."""
        return self.total - self.slack - self.optimizer_bytes

    def least(self, peak_bytes: int, free: int = 0) -> int:
        """Return the smallest total that leaves `peak_bytes` for forward and backward.

        Args: free: what must be left free besides, of which the reserve is a part.
        """
        needed = peak_bytes + self.optimizer_bytes
        total = int((needed - 1) / (1 - self.reserve)) + 1  # the least with total - slack >= needed
        return max(total, needed + free)


def find_plan(
    *spaces: Space, budget: Budget, batch: int, seq: int, times: bool = True
) -> MemoryPlan:
    """Return the fastest plan that fits a budget, with its prediction.

    Args:
        spaces: the plans to choose from. Those of later spaces are slower if they keep as much.
        batch, seq: the shape, for the prediction.
        times: whether the prediction has the seconds also of the first space's plan that keeps all.
            Nothing else needs the rates of the device then.
    Raises:
        ConfigError: no plan fits. The message names the least bytes with which one does.
    """
    best: tuple[MemoryPlan, Space] | None = None
    for space in spaces:
        plan = space.fastest(budget.usable, budget.slack)
        if plan is not None and (best is None or space.time(plan) < best[1].time(best[0])):
            best = plan, space
        if plan == space.uniform[LayerPlan()]:
            break
    if best is None:
        total, needed = budget.total, min(space.least_budget(budget) for space in spaces)
        raise ConfigError(
            f"memory plan: a budget of {total} bytes ({total / GIB:.2f} GiB) is too small for "
            f"batch {batch} and seq {seq}: at least {needed} bytes ({needed / GIB:.2f} GiB) are "
            "needed; raise the budget, or lower batch or seq"
        )
    plan, space = best
    simulation = space.simulate(plan)
    whole = plan == space.uniform[LayerPlan()]
    kept = tuple(map(_kept, _forward(simulation))) if whole else space.task.kept_by(plan.layers)
    prediction = Prediction(
        batch=batch,
        seq=seq,
        budget=budget.total,
        peak_bytes=simulation.peak_bytes + budget.optimizer_bytes,
        reserved_bytes=simulation.reserved_bytes + budget.optimizer_bytes,
        optimizer_bytes=budget.optimizer_bytes,
        reserve_bytes=budget.slack,
        weight_bytes=simulation.weight_bytes,
        grad_bytes=simulation.grad_bytes,
        host_bytes=simulation.host_bytes,
        seconds=space.time(plan) if times or plan != spaces[0].uniform[LayerPlan()] else None,
        gains=tuple(space.gains(plan)),
        layer_bytes=kept,
    )
    return replace(plan, prediction=prediction)


def largest(needed: Callable[[int], int], budget: int, start: int = 1) -> int:
    """Return the largest positive number that needs at most `budget` bytes, or 0, within 2%.

    Args: needed: the bytes that a number needs; they grow. start: the number to begin with.
    """
    low, high = 0, start
    while needed(high) <= budget:
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= budget else (low, middle)
    return low
