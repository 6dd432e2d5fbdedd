"""Hundreds of rounds of faults in training; the suite runs one of them in tests/attack."""

from __future__ import annotations

import pytest

from tests.attack.attacks_faults import a_run_survives_faults
from tests.attack.harness import ATTACKS, run_one


@pytest.mark.long
@pytest.mark.parametrize("hundred", range(4))
def test_a_run_survives_hundreds_of_rounds_of_faults(hundred: int) -> None:
    (one,) = [one for one in ATTACKS if one.run is a_run_survives_faults]
    seeds = range(1000 + 100 * hundred, 1100 + 100 * hundred)
    broken = [(seed, said) for seed in seeds if (said := run_one(one, seed).broken) is not None]
    assert not broken
