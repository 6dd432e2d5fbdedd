"""Tests of the tables and the plot of memory.json, with an invented result."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory_plot
from benchmarks.common import RESULTS
from benchmarks.memory_works import HF, LIGER, OURS
from tests import markdown


def row(setting: str, ms: float, **values: object) -> dict:
    return {
        "gpu": "NVIDIA H200",
        "work": "llama-3-8b, 8 x 2048, AdamW",
        "setting": setting,
        "implementation": setting.partition(":")[0],
        "keeps": "plan" if "plan for" in setting else "input",
        "ms": ms,
        "tokens/s": 16384e3 / ms,
        "peak GiB": 61.34,
        "reserved GiB": 63.0,
        "host GiB": 0.0,
    } | values


@pytest.fixture
def result() -> dict:
    failed = row(f"{HF}: nothing recomputed", 1.0) | {
        "error": "OutOfMemoryError: CUDA out of memory"
    }
    del failed["ms"]
    level = {"gpu": "NVIDIA H200", "level": "all", "bytes per token": 94208.0}
    case = {"gpu": "NVIDIA H200", "case": "0: llama", "predicted GiB": 1.01, "measured GiB": 1.0}
    return {
        "rows": [
            failed,
            row(f"{LIGER}: every block checkpointed", 1600.0),
            row(f"{OURS}: plan for 70 GiB", 1440.0, **{"predicted GiB": 69.96}),
            row(f"{OURS}: plan for 70 GiB and 32 GiB of host memory", 1400.0, **{"host GiB": 31.0}),
        ],
        "levels": [
            level | {"host bytes per token": 0.0, "ms of a layer": 38.5, "extra ms": 0.0},
            {"gpu": "NVIDIA H200", "level": "input", "error": "RuntimeError: none"},
        ],
        "recipes": [
            {"gpu": "NVIDIA H200", "work": "llama", "recipe": "AdamW", "ms": 1548.4}
            | {f"{name} bytes": 2**30 for name in ("parameter", "state", "gradient", "peak")}
        ],
        "predictions": [
            case | {"ratio": 1.01},
            case | {"case": "1: gemma", "ratio": 0.985, "ranks that ran": 1},
            {"gpu": "NVIDIA H200", "case": "2: qwen2", "error": "not measured: no time was left"},
        ],
    }


def test_the_page_has_every_row(result):
    lines = memory_plot.page(result).splitlines()
    assert "## llama-3-8b, 8 x 2048, AdamW, on NVIDIA H200" in lines
    assert f"| {HF}: nothing recomputed | out of memory |  |  |  |  |  |  |" in lines
    assert (
        f"| {OURS}: plan for 70 GiB | 1440 | 0.900 | 11378 | 61.3 | 70.0 | 63.0 | 0.0 |"
    ) in lines
    assert "| all | 92.0 | 0.0 | 38.50 | 0.00 |" in lines
    assert "| input |  |  |  | RuntimeError: none |" in lines
    assert "| AdamW | 1.0 | 1.0 | 1.0 | 1.0 | 1548 |" in lines
    assert (
        "2 of 3 cases were measured. Predicted / measured peak: from 0.9850 to 1.0100, median "
        "1.0100; 1 are between 0.99 and 1.03."
    ) in lines
    assert "| 1: gemma, rank 0 alone | 1.010 | 1.000 | 0.9850 |" in lines
    assert "| 2: qwen2 |  |  | not measured: no time was left |" in lines


def test_the_page_and_the_plot_are_written_beside_the_result(result, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "memory.json").write_text(json.dumps(result))
    memory_plot.main(["--results", str(tmp_path)])
    assert (tmp_path / "memory.md").read_text() == memory_plot.page(result)
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    memory_plot.draw({}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_points_of_a_plot_are_told_apart(result):
    """Only memory that a plan takes counts as host memory, not the bytes of any step."""
    rows = [row | {"host GiB": max(row["host GiB"], 4e-8)} for row in result["rows"][1:]]
    found = {label: len(own) for label, own in memory_plot.kinds(OURS, rows).items()}
    assert found == {f"{OURS}, planned": 1, f"{OURS}, planned, with host memory": 1}
    assert [*memory_plot.kinds(LIGER, rows)] == [LIGER]


def test_the_figures_of_the_docs_are_those_of_the_committed_run():
    """Rows of the docs' tables with figures are rows of memory.md, made from memory.json."""
    file = RESULTS / "memory.json"
    measured = memory_plot.page(json.loads(file.read_text())) if file.is_file() else ""
    docs = (markdown.ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    _, _, section = docs.partition("\n## Measured\n")
    shown = [line.strip() for line in section.splitlines() if line.strip().startswith("|")]
    assert not set(shown) - set(measured.splitlines())
    if measured:
        assert (RESULTS / "memory.md").read_text() == measured
