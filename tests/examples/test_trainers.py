"""The examples of trainers train as one process does, and as transformers' model does in them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.trainer_cases import ALL, INSTALL, RANKS, TOOLS
from tests.parallel.ranks import run_ranks


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_processes(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """They equal one process, and transformers' model in the same tool."""
    monkeypatch.setenv(ALL, "1" if whole else "")
    report = run_ranks("tests.examples.trainer_cases", RANKS, tmp_path)
    for name, outcome in report.items():
        with subtests.test(name):
            assert isinstance(outcome, dict), outcome
            assert len(outcome) == 3
            for what, error in outcome.items():
                assert error <= 1e-5, f"{what} differs by {error}"
    for tool, module in TOOLS.items():
        with subtests.test(tool):
            if find_spec(module) is None:
                pytest.skip(INSTALL)
            assert any(name.startswith(tool) for name in report)
