"""The timeline of copies to host memory, and the local search for plans that hide them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.offload import HOLD
from ligermodels.memory.plan import LayerPlan
from ligermodels.memory.planner import Choices, layer_seconds


def seconds(copies: list[float], forward: float = 1.0, backward: float = 2.0) -> float:
    count = len(copies)
    return float(layer_seconds(np.full(count, forward), np.full(count, backward), np.array(copies)))


def test_a_copy_may_last_as_long_as_its_memory_is_held() -> None:
    for layer in range(3):
        copies = [0.0] * 8
        copies[layer] = HOLD + 0.0  # it comes back while the layer above runs backward
        assert seconds(copies, backward=HOLD) == 8 + 8 * HOLD
        copies[layer] += 0.5
        assert seconds(copies, backward=HOLD) == 8 + 8 * HOLD + 1.0  # forward and backward wait


def test_copies_wait_for_each_other() -> None:
    assert seconds([0.0] * 8) == seconds([1.0] * 6 + [0.0] * 2) == 24.0  # they fit behind compute
    assert seconds([2.0] * 10, backward=3.0) > 10 + 30
    assert seconds([2.0, 0.0] * 5, backward=3.0) == 10 + 30


@pytest.mark.parametrize("layers", [1, 2, HOLD, 6])
def test_the_costs_are_those_of_the_layers_one_after_the_other(layers: int) -> None:
    """Follow which layers' tensors are on the GPU, as `Offloader` says that it moves them."""
    draw = np.random.default_rng(3)
    choices = random_choices(draw, layers)
    for plan in draw.integers(0, 8, (40, layers)):
        at = plan, np.arange(layers)
        kept, beside, moves = choices.kept[at], choices.beside[at], plan >= 4

        # The bytes up to layer i; of those that move only what has not left, or has returned.
        def present(i: int, first: int, kept=kept, moves=moves) -> int:
            return sum(kept[j] for j in range(i + 1) if not moves[j] or j >= first)

        backward = [present(i, i - 1) + beside[i] for i in range(layers)]
        at_head = present(layers - 1, layers - HOLD) + choices.at_head
        seconds, peak, host = choices.costs(plan)
        copies = kept * moves / choices.host_bytes
        assert peak == max(*backward, at_head) and host == sum(kept * moves)
        assert seconds == layer_seconds(choices.forward[at], choices.backward[at], copies)


def random_choices(draw: np.random.Generator, layers: int) -> Choices:
    """Four policies, each on the GPU and in host memory."""
    kept = np.sort(draw.integers(5, 60, (4, layers)), axis=0)[::-1]
    backward = np.sort(draw.integers(10, 30, (4, layers)), axis=0)
    return Choices(
        [LayerPlan(policy, host) for host in (False, True) for policy in POLICIES],
        kept=np.tile(kept, (2, 1)),
        beside=draw.integers(20, 40, (1, layers)) * np.ones((8, 1), int),
        forward=np.full((8, layers), 0.01),
        backward=np.tile(backward, (2, 1)) / 1000,
        at_head=30,
        host_bytes=2000.0,
    )


def test_improved_plans_fit_and_are_close_to_the_best_ones() -> None:
    draw = np.random.default_rng(1)
    ratios = []
    for _ in range(12):
        choices = random_choices(draw, 4)
        budget, host_budget = int(draw.integers(90, 250)), int(draw.integers(0, 100))
        every = np.array(list(itertools.product(range(8), repeat=4)))
        best = choices.scores(every, budget, host_budget).min()
        plan = choices.improved(np.zeros(4, int), budget, host_budget)
        np.testing.assert_array_equal(plan, choices.improved(np.zeros(4, int), budget, host_budget))
        found, peak, host = choices.costs(plan)
        assert (peak <= budget and host <= host_budget) == (best < 1)
        if best < 1:
            ratios.append(found / best)
    assert len(ratios) > 6 and max(ratios) < 1.1 and np.mean(ratios) < 1.02
