"""The benchmark of QLoRA: a tiny run of ours, and the figures on the page."""

from __future__ import annotations

import json

import pytest

from benchmarks import qlora
from benchmarks.common import RESULTS
from tests import markdown

PAGE = (markdown.ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")


def test_a_tiny_run() -> None:
    kept = qlora.run_one("ligermodels", 1, 16, 1, "cpu", True)
    recomputed = qlora.run_one("ligermodels, every block recomputed", 1, 16, 1, "cpu", True)
    assert kept["tokens/s"] > 0
    assert kept["last loss"] == recomputed["last loss"]
    (ours, *_) = qlora.dequantize_times("cpu", 256, 128)
    assert ours["conversion"] == "ligermodels" and ours["relative error"] < 0.11


def test_the_figures_on_the_page_are_those_of_the_committed_run() -> None:
    runs = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("qlora", "qlora_h100"))
    for row in [row for run in runs for row in run["rows"]]:
        ms = row["ms"] / row.get("micro-batches of a step", 1)
        shown = f"{ms:.0f} | {row['tokens/s']:,.0f} | {row['peak GiB']:.1f}"
        assert f"| {row['row']} | {shown} |" in PAGE
    ours, theirs = json.loads((RESULTS / "dequantize.json").read_text())["rows"]
    compared = f"takes {ours['ms']:.2f} ms, and {theirs['ms']:.2f} ms with bitsandbytes"
    assert compared in " ".join(PAGE.split())
    assert ours["relative error"] == pytest.approx(theirs["relative error"], rel=0.01)
