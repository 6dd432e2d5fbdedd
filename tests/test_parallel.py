"""Two gloo processes give the results of one, under DDP, FSDP2 and tensor parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import parallel_worker

ROOT = Path(__file__).parent.parent
SECONDS = 300


def run_workers(folder: Path, whole: bool) -> dict[str, dict[str, float] | str]:
    """Run the cases in one pair of processes, because starting them costs more than the cases."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.parallel_worker"]
    results, runs = folder / "results.pt", "whole" if whole else "sample"
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "rendezvous"), str(results), runs],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(parallel_worker.WORLD)
    ]
    try:
        outputs = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
    return torch.load(results)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_processes_equal_one(tmp_path: Path, subtests: pytest.Subtests, whole: bool) -> None:
    report = run_workers(tmp_path, whole)
    assert len(report) == len(parallel_worker.RUNS if whole else parallel_worker.SAMPLE)
    for name, outcome in report.items():
        with subtests.test(name):
            assert isinstance(outcome, dict), outcome
            assert outcome, "the case compared nothing"
            for what, error in outcome.items():
                assert error <= 2e-6, f"{what} differs by {error}"
