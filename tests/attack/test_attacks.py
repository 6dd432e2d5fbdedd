"""A fast sample of the attacks runs in the suite; the thousands behind a marker."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests import sandbox
from tests.attack.__main__ import load_attacks, report
from tests.attack.harness import ATTACKS, Attack, Count, run_one
from tests.training import tiny_run

load_attacks()

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="CUDA does not survive a fork; python -m tests.attack hides the GPUs",
)


def test_an_older_version_can_be_attacked() -> None:
    """It has other modules, so only public names are imported at the head of a file."""
    helpers = [Path(module.__file__) for module in (sandbox, tiny_run)]
    for file in [*Path(__file__).parent.glob("*.py"), *helpers]:
        assert not re.findall(
            r"^(?:from|import) ligermodels\.(?!cli import main).*", file.read_text(), re.M
        ), file


def test_a_report_of_text_that_is_not_unicode(tmp_path: Path, monkeypatch) -> None:
    count = Count(runs=2, faults=1, by_label={"x": [2, 1]}, examples={"x": "seed 1: \udcff"})
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", printed)
    report({0: count}, [ATTACKS[0].group], tmp_path / "counts.json")
    assert r"x: seed 1: \udcff" in printed.buffer.getvalue().decode()  # type: ignore[attr-defined]
    (row,) = json.loads((tmp_path / "counts.json").read_text())
    assert row == {
        "group": ATTACKS[0].group,
        "fault": ATTACKS[0].fault,
        "attack": ATTACKS[0].name,
        **vars(count),
    }


def test_counts_are_kept_if_they_cannot_be_printed(tmp_path: Path, monkeypatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(ValueError, match="closed file"):
        report({0: Count(runs=1)}, [], tmp_path / "counts.json")
    monkeypatch.undo()
    assert json.loads((tmp_path / "counts.json").read_text())[0]["runs"] == 1


@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: f"{one.group}{one.fault}-{one.name}")
def test_sample(one: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    # The many seeds draw the losses of their runs.
    monkeypatch.setattr("ligermodels.training.run.plot_losses", tiny_run.draw_nothing)
    assert run_one(one, seed=0).broken is None


@pytest.mark.long
@pytest.mark.parametrize("one", ATTACKS, ids=lambda one: f"{one.group}{one.fault}-{one.name}")
def test_many_seeds(one: Attack) -> None:
    outcomes = {seed: run_one(one, seed) for seed in range(1, 41)}
    assert not {seed: o.broken for seed, o in outcomes.items() if o.broken is not None}
