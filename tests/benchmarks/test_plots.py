"""The tables and plots of the committed results are drawn from the files alone."""

from __future__ import annotations

import shutil
import sys

import pytest

from benchmarks import plots
from benchmarks.common import RESULTS


def test_the_page_and_the_plots_of_ops(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    shutil.copy(RESULTS / "ops.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["plots", "--results", str(tmp_path)])
    plots.main()
    assert (tmp_path / "ops.md").read_text() == (RESULTS / "ops.md").read_text()
    for name in ("ops_time.png", "linear_ce.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_the_steps(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for _, rows in plots.step_bars(RESULTS):
        assert [row["implementation"] for row in rows] == list(plots.BARS)
    plots.draw_steps(RESULTS, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
