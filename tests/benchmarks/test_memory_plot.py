"""The tables and the plot of memory.json."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import memory_plot
from benchmarks.common import RESULTS
from tests import markdown


def test_the_page_and_the_plot_are_written_beside_the_result(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    shutil.copy(RESULTS / "memory.json", tmp_path)
    memory_plot.main(["--results", str(tmp_path)])
    assert (tmp_path / "memory.md").read_text() == (RESULTS / "memory.md").read_text()
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_the_figures_of_the_docs_are_those_of_the_committed_run() -> None:
    """Rows of the docs' tables with figures are rows of memory.md."""
    measured = memory_plot.page(json.loads((RESULTS / "memory.json").read_text()))
    docs = (markdown.ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    _, _, section = docs.partition("\n## Measured\n")
    shown = [line.strip() for line in section.splitlines() if line.strip().startswith("|")]
    assert shown and not set(shown) - set(measured.splitlines())
