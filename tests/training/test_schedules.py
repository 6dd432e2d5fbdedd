"""The learning rate of each step."""

from __future__ import annotations

import pytest

from ligermodels.training.config import SCHEDULES
from ligermodels.training.schedules import learning_rate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_ends_where_it_says(schedule):
    rates = [learning_rate(step, 110, 2.0, 10, 0.1, schedule) for step in range(110)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == 2.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    last = {"constant": 2.0, "inverse_sqrt": 2.0 * (10 / 110) ** 0.5}.get(schedule, 0.2)
    assert rates[-1] == pytest.approx(last)
    middle = {"cosine": 1.1, "linear": 1.1, "inverse_sqrt": 2.0 * (10 / 60) ** 0.5}
    assert rates[59] == pytest.approx(middle.get(schedule, 2.0))


def test_a_single_step_without_a_warm_up_has_the_last_rate():
    assert learning_rate(0, 1, 2.0, 0, 0.5) == pytest.approx(1.0)


def test_wsd_keeps_the_peak_for_four_fifths():
    rates = [learning_rate(step, 100, 1.0, 0, 0.0, "wsd") for step in range(100)]
    assert rates[:80] == [1.0] * 80 and rates[89] == pytest.approx(0.5)
