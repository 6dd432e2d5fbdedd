"""Two gloo processes give the results of one, under DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel_worker import RUNS, SAMPLE, WORLD


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests, whole: bool) -> None:
    report = run_ranks("tests.parallel_worker", WORLD, tmp_path, whole)
    assert len(report) == WORLD * len(RUNS if whole else SAMPLE)
    for name, outcome in report.items():
        with subtests.test(name):
            assert isinstance(outcome, dict), outcome
            assert outcome, "the case compared nothing"
            for what, error in outcome.items():
                assert error <= 2e-6, f"{what} differs by {error}"
