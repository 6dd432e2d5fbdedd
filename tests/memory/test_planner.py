"""The search for the fastest memory plan: exact, within the budget, and never slower with more."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import KEEPS
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.memory.planner import (
    Option,
    Problem,
    Space,
    find_plan,
    largest,
    least_budget,
    search,
    usable_bytes,
)
from ligermodels.memory.rates import Rates
from ligermodels.memory.simulate import Phase, Simulation, Work

RATES = Rates(products=1.0, attention=1.0, memory=1.0, host_bytes=1.0, source="a test")


def random_problem(draw: random.Random, host: bool) -> Problem:
    layers = []
    for _ in range(draw.randint(1, 4)):
        options = []
        for keep in KEEPS:
            kept, beside = draw.randint(0, 30), draw.randint(20, 60)
            options.append(Option(LayerPlan(keep), kept, 0, beside, draw.randint(1, 30)))
            if host:
                moved = LayerPlan(keep, host=True)
                options.append(Option(moved, 0, kept, beside + 5, draw.randint(1, 30)))
        layers.append(tuple(options))
    return Problem(tuple(layers), draw.randint(20, 60), 1.0)


def fits(task: Problem, options: tuple[Option, ...], budget: int, host_budget: int) -> bool:
    kept = list(itertools.accumulate(option.kept for option in options))
    peaks = [so_far + option.beside for so_far, option in zip(kept, options)]
    return (
        max(*peaks, kept[-1] + task.at_head) <= budget
        and sum(option.host for option in options) <= host_budget
    )


@pytest.mark.parametrize("host", [False, True])
def test_the_search_finds_what_trying_everything_finds(host: bool) -> None:
    draw = random.Random(host)
    found = 0
    for _ in range(60):
        task = random_problem(draw, host)
        budget, host_budget = draw.randint(30, 130), draw.randint(1, 31) if host else 0
        possible = [
            sum(option.seconds for option in options)
            for options in itertools.product(*task.layers)
            if fits(task, options, budget, host_budget)
        ]
        layers = search(task, budget, host_budget)
        assert (layers is None) == (not possible)
        if layers is not None:
            found += 1
            plan = MemoryPlan(tuple(layers))
            options = tuple(
                next(option for option in options if option.plan == layer)
                for layer, options in zip(layers, task.layers)
            )
            assert sum(option.seconds for option in options) == min(possible)
            assert fits(task, options, budget, host_budget) and task.peak(plan) <= budget
    assert 10 < found < 60


def fake(kept: dict[str, int], cost: dict[str, int], excess: int = 0) -> Any:
    """A function that simulates four layers exactly, but for mixed plans with `excess` bytes.

    With tiles, backward takes 30 bytes less beside what is kept, and 8 more units of work.
    """

    def simulate(plan: MemoryPlan) -> Simulation:
        phases = {"forward": Phase(100, 110, 100)}
        now = 100
        for i, layer in enumerate(plan.layers):
            after = now + kept[layer.keep]
            phases[f"forward of layer {i}"] = Phase(now, after + 5, after, Work(10))
            now = after
        phases["forward of head"] = Phase(now, now + 20, now, Work(10))
        for i, layer in reversed(list(enumerate(plan.layers))):
            work = Work(20 + cost[layer.keep] + (8 if layer.tile else 0))
            before, now = now, now - kept[layer.keep] + 10
            peak = before + (10 if layer.tile else 40)
            phases[f"backward of layer {i}"] = Phase(before, peak, now, work)
        peak = max(phase.peak for phase in phases.values())
        peak += excess if len(set(plan.layers)) > 1 else 0
        return Simulation(peak, "", 100, 40, 0, phases=phases)

    return simulate


KEPT = {"all": 90, "no_gate_up": 40, "attention": 20, "input": 10}
COST = {"all": 0, "no_gate_up": 6, "attention": 10, "input": 12}


def space(excess: int = 0) -> Space:
    return Space(fake(KEPT, COST, excess), 4, RATES, 0)


@pytest.mark.parametrize("excess", [0, 7, 20])
def test_a_larger_budget_is_never_slower(excess: int) -> None:
    """Also if a mixed plan needs somewhat more than the sum of its layers."""
    times = []
    for budget in range(space().least_bytes, 520):
        plan = find_plan(space(excess), budget=budget, batch=1, seq=1)
        assert plan.prediction is not None and plan.prediction.peak_bytes <= budget
        times.append(plan.prediction.seconds)
        assert plan == find_plan(space(excess), budget=budget, batch=1, seq=1)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert plan.layers == (LayerPlan(),) * 4


@pytest.mark.parametrize("reserve", [0.0, 0.03])
def test_too_small_a_budget_names_the_least_bytes(reserve: float) -> None:
    given: dict[str, Any] = {"batch": 3, "seq": 5, "optimizer_bytes": 77, "reserve": reserve}
    needed = least_budget(space().least_bytes, 77, reserve)
    message = f"too small for batch 3 and seq 5: at least {needed} bytes"
    with pytest.raises(ConfigError, match=message):
        find_plan(space(), budget=needed - 1, **given)
    plan = find_plan(space(), budget=needed, **given)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes + plan.prediction.reserve_bytes <= needed
    assert plan.prediction.optimizer_bytes == 77


def test_the_least_budget_is_exact() -> None:
    for peak in range(1, 3000, 7):
        needed = least_budget(peak, 11, 0.03)
        assert usable_bytes(needed, 11, 0.03) >= peak > usable_bytes(needed - 1, 11, 0.03)


def test_only_the_layers_that_set_the_peak_have_tiles() -> None:
    """That is the first one here, whose backward runs when most gradients exist."""
    less = fake(KEPT | {"input": 4}, COST)
    whole, tiled = Space(less, 4, RATES, 0), Space(less, 4, RATES, 0, [64])
    assert tiled.least_bytes < whole.least_bytes
    counts = []
    for budget in range(tiled.least_bytes, 520):
        plan = find_plan(tiled, budget=budget, batch=1, seq=1)
        with_tiles = [layer.tile == 64 for layer in plan.layers]
        assert with_tiles == sorted(with_tiles, reverse=True)
        counts.append(sum(with_tiles))
        if budget >= whole.least_bytes:
            without = find_plan(whole, budget=budget, batch=1, seq=1)
            assert tiled.time(plan) <= whole.time(without)
    assert counts[0] and not counts[-1] and {1, 2} <= set(counts)


def test_further_bytes_are_priced() -> None:
    big = {keep: size * 2**26 for keep, size in KEPT.items()}
    whole = Space(fake(big, COST), 4, RATES, 0)
    plan = find_plan(whole, budget=whole.least_bytes, batch=1, seq=1)
    assert plan.prediction is not None
    gains = plan.prediction.gains
    assert gains and gains[-1][1] == whole.time(whole.uniform[LayerPlan()])
    assert list(gains) == sorted(gains) and "GiB more" in str(plan)


def test_the_largest_number_is_found() -> None:
    for limit in (0, 1, 2, 3, 17, 64, 100, 5000):
        for start in (1, 128):
            found = largest(lambda number: number <= limit, start)  # noqa: B023
            assert found <= limit <= found * 1.02 + 1
