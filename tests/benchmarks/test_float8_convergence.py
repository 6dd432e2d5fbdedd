"""The convergence benchmark of float8 trains its arms alike, and keeps the runs that are done."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import english_text, float8_convergence
from tests import markdown

ARMS = ("bf16", "tensorwise")


def test_small_models_learn_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["_", "--tiny", "--seeds", "1", "--arms", *ARMS, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    float8_convergence.main()
    rows = json.loads((tmp_path / "float8_convergence.json").read_text())["arms"]
    found = {row["arm"]: row for row in rows}
    assert set(found) == {*ARMS, "float32", "tf32"}
    for arm in ARMS:
        assert found[arm]["end"] < 2.9 < 3.4 < found[arm]["mark"]
        assert abs(found[arm]["end - bf16"]) < 0.04
    assert abs(found["float32"]["mark - bf16"]) < 0.02
    assert (tmp_path / "float8_convergence.png").exists()
    # A run that is done is not made again.
    monkeypatch.setattr(float8_convergence, "train", None)
    float8_convergence.main()


def test_the_table_of_the_docs_is_that_of_the_committed_runs() -> None:
    page = (markdown.ROOT / "docs" / "float8.md").read_text()
    path = float8_convergence.RESULTS / "float8_convergence.json"
    for row in json.loads(path.read_text())["arms"]:
        if "end" in row:
            end = f"{row['seeds']} | {row['end']:.3f} | {row['end spread']:.3f} |"
            (line,) = (x for x in page.splitlines() if f"| {end}" in x)
            assert line.startswith(f"| {row['arm']}"), line
            assert row["arm"] == "bf16" or f"| {row['end - bf16']:.3f} |" in line, line
            assert f"| {round(row['tokens/s'], -3):,.0f} |" in line, line


def test_prose_is_taken_from_pages() -> None:
    prose = (
        "This is a sentence that is long enough to be taken for a paragraph of plain prose text."
    )
    page = f"<html><body><p>{prose}</p><pre>{prose}</pre><script>{prose}</script><p>x</p></body>"
    assert english_text.text_of(page) == prose
    assert english_text.text_of(f"{prose}\n\n{'1 + 2 = 3; ' * 20}") == prose
