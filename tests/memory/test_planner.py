"""The search for the fastest memory plan: exact, within the budget, and never slower with more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ligermodels.errors import ConfigError
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.byte_sizes import MIB
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.memory.planner import (
    Budget,
    Choices,
    Space,
    find_plan,
    search,
)
from ligermodels.memory.rates import Rates, Work
from ligermodels.memory.simulate import Simulation
from ligermodels.memory.tracker import Phase

RATES = Rates(products=1.0, attention=1.0, memory=1.0, host_bytes=1.0, source="a test")


def random_choices(draw: np.random.Generator) -> Choices:
    shape = len(POLICIES), int(draw.integers(1, 5))
    kept, beside = draw.integers(0, 31, shape), draw.integers(20, 61, shape)
    backward = draw.integers(1, 31, shape)
    at_head = int(draw.integers(20, 61))
    return Choices([*map(LayerPlan, POLICIES)], kept, beside, 0 * kept, backward, at_head)


def test_the_search_finds_what_trying_everything_finds() -> None:
    draw = np.random.default_rng(0)
    found = 0
    for _ in range(120):
        task, budget = random_choices(draw), int(draw.integers(30, 130))
        every = itertools.product(task.plans, repeat=task.kept.shape[1])
        costs = [task.step(layers) for layers in every]
        possible = [seconds for seconds, peak in costs if peak <= budget]
        layers = search(task, budget)
        assert (layers is None) == (not possible)
        if layers is not None:
            found += 1
            seconds, peak = task.step(layers)
            assert seconds == min(possible) and peak <= budget
    assert 20 < found < 120


def fake(kept: dict[str, int], cost: dict[str, int], excess: int = 0) -> Any:
    """A function that simulates four layers exactly, but for mixed plans with `excess` bytes.

    With tiles, backward takes 30 bytes less beside what is kept, and 8 more units of work.
    """

    def simulate(plan: MemoryPlan) -> Simulation:
        phases = {"forward": Phase(100, 110, 100)}
        now = 100
        for i, layer in enumerate(plan.layers):
            after = now + kept[layer.policy]
            phases[f"forward of layer {i}"] = Phase(now, after + 5, after, Work(10))
            now = after
        phases["forward of head"] = Phase(now, now + 20, now, Work(10))
        for i, layer in reversed(list(enumerate(plan.layers))):
            work = Work(20 + cost[layer.policy] + (8 if layer.tile else 0))
            before, now = now, now - kept[layer.policy] + 10
            peak = before + (10 if layer.tile else 40)
            phases[f"backward of layer {i}"] = Phase(before, peak, now, work)
        peak = max(phase.peak for phase in phases.values())
        peak += excess if len(set(plan.layers)) > 1 else 0
        return Simulation(peak, 100, 40, phases)

    return simulate


KEPT = {"all": 90, "no_gate_up": 40, "attention": 20, "input": 10}
COST = {"all": 0, "no_gate_up": 6, "attention": 10, "input": 12}


def space(excess: int = 0) -> Space:
    return Space(fake(KEPT, COST, excess), 4, lambda: RATES, 0)


@pytest.mark.parametrize("excess", [0, 7, 20])
def test_a_larger_budget_is_never_slower(excess: int) -> None:
    """Also if a mixed plan needs somewhat more than the sum of its layers."""
    times = []
    for budget in range(space().least_budget(Budget(0)), 520, 7):
        plan = find_plan(space(excess), budget=Budget(budget), batch=1, seq=1)
        assert plan.prediction is not None and plan.prediction.peak_bytes <= budget
        times.append(plan.prediction.seconds)
    assert plan == find_plan(space(excess), budget=Budget(budget), batch=1, seq=1)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert plan.layers == (LayerPlan(),) * 4


@pytest.mark.parametrize("reserve", [0.0, 0.03])
def test_too_small_a_budget_names_the_least_bytes(reserve: float) -> None:
    needed = space().least_budget(Budget(0, 77, reserve))
    message = f"too small for batch 3 and seq 5: at least {needed} bytes"
    with pytest.raises(ConfigError, match=message):
        find_plan(space(), budget=Budget(needed - 1, 77, reserve), batch=3, seq=5)
    plan = find_plan(space(), budget=Budget(needed, 77, reserve), batch=3, seq=5)
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes + plan.prediction.reserve_bytes <= needed
    assert plan.prediction.optimizer_bytes == 77


def test_a_plan_that_keeps_everything_takes_one_simulation_and_no_rates() -> None:
    """Unless its seconds are asked for. It is the same plan, and the search is the same."""
    simulated = []

    def simulate(plan: MemoryPlan) -> Simulation:
        simulated.append(plan)
        return fake(KEPT, COST)(plan)

    def find(rates: Callable[[], Rates], budget: int, times: bool) -> MemoryPlan:
        spaces = (Space(simulate, 4, rates, 0, head_chunk=chunk) for chunk in (None, 64))
        return find_plan(*spaces, budget=Budget(budget), batch=1, seq=1, times=times)

    whole = find(lambda: pytest.fail("measured"), 520, False)
    assert simulated == [replace(whole, prediction=None)] and "time" not in str(whole)
    assert MemoryPlan.from_dict(whole.to_dict()) == whole
    timed = find(lambda: RATES, 520, True)
    assert timed.prediction is not None and timed.prediction.seconds is not None
    said = replace(timed.prediction, seconds=None)
    assert replace(timed, prediction=said) == whole
    assert sum(said.layer_bytes) == 4 * KEPT["all"]
    assert find(lambda: RATES, 400, False) == find(lambda: RATES, 400, True) != whole


def test_a_block_as_large_as_the_largest_is_left_free() -> None:
    """Free memory may lie in pieces that are smaller."""

    def simulate(plan: MemoryPlan) -> Simulation:
        found = fake(KEPT, COST)(plan)
        return replace(found, reserved_bytes=found.peak_bytes, largest_bytes=60)

    made = Space(simulate, 4, lambda: RATES, 0, reserved=True)
    for reserve in (0.0, 0.03, 0.5):
        needed = made.least_budget(Budget(0, 77, reserve))
        said = find_plan(made, budget=Budget(needed, 77, reserve), batch=1, seq=1).prediction
        assert said is not None and needed - said.reserved_bytes >= max(60, said.reserve_bytes)
        with pytest.raises(ConfigError, match=f"at least {needed} bytes"):
            find_plan(made, budget=Budget(needed - 1, 77, reserve), batch=1, seq=1)


def test_only_the_layers_that_set_the_peak_have_tiles() -> None:
    """That is the first one here, whose backward runs when most gradients exist."""
    less = fake(KEPT | {"input": 4}, COST)
    whole, tiled = Space(less, 4, lambda: RATES, 0), Space(less, 4, lambda: RATES, 0, [64])
    assert tiled.least_budget(Budget(0)) < whole.least_budget(Budget(0))
    counts = []
    for budget in range(tiled.least_budget(Budget(0)), 520, 4):
        plan = find_plan(tiled, budget=Budget(budget), batch=1, seq=1)
        with_tiles = [layer.tile == 64 for layer in plan.layers]
        assert with_tiles == sorted(with_tiles, reverse=True)
        counts.append(sum(with_tiles))
        if budget >= whole.least_budget(Budget(0)):
            without = find_plan(whole, budget=Budget(budget), batch=1, seq=1)
            assert tiled.time(plan) <= whole.time(without)
    assert counts[0] and not counts[-1] and {1, 2} <= set(counts)


def test_a_smaller_chunk_of_the_head_is_taken_where_its_bytes_make_the_layers_faster() -> None:
    def simulate(plan: MemoryPlan) -> Simulation:
        made = fake(KEPT, COST)(plan)
        head = made.phases["forward of head"]
        if plan.head_chunk is None:
            peak, cost = head.after + 60, 0.0
        else:
            peak, cost = head.after + 5, 8.0
        made.phases["forward of head"] = Phase(
            head.before, peak, head.after, Work(product_flops=cost)
        )
        made.peak_bytes = max(phase.peak for phase in made.phases.values())
        return made

    spaces = [Space(simulate, 4, lambda: RATES, 0, head_chunk=chunk) for chunk in (None, 64)]
    chunks = []
    for budget in range(spaces[1].least_budget(Budget(0)), 620, 5):
        plan = find_plan(*spaces, budget=Budget(budget), batch=1, seq=1)
        chunks.append(plan.head_chunk)
        if budget >= spaces[0].least_budget(Budget(0)):
            alone = find_plan(spaces[0], budget=Budget(budget), batch=1, seq=1)
            assert spaces[0].time(alone) >= plan.prediction.seconds  # type: ignore[union-attr]
    assert chunks[0] == 64 and chunks[-1] is None


def test_further_bytes_are_priced() -> None:
    big = {policy: size * 2**26 for policy, size in KEPT.items()}
    whole = Space(fake(big, COST), 4, lambda: RATES, 0)
    plan = find_plan(whole, budget=Budget(whole.least_budget(Budget(0))), batch=1, seq=1)
    assert plan.prediction is not None
    gains = plan.prediction.gains
    assert gains and gains[-1][1] == pytest.approx(whole.time(whole.uniform[LayerPlan()]))
    assert list(gains) == sorted(gains) and "GiB more" in str(plan)


def test_host_memory_makes_a_plan_faster_within_its_budget() -> None:
    sizes = {policy: size * MIB for policy, size in KEPT.items()}
    rates = replace(RATES, products=1e3, host_bytes=1e4 * MIB)
    times = []
    for host in (0, 60 * MIB, 400 * MIB):
        here = Space(fake(sizes, COST), 8, lambda: rates, host)
        plan = here.searched(here.task.at_head + 110 * MIB)
        assert plan is not None and plan.uses_host == (host > 0)
        assert sum(sizes[layer.policy] for layer in plan.layers if layer.host) <= host
        times.append(here.task.step(plan.layers)[0])
    assert times[0] > times[1] > times[2]
