"""The convergence benchmark of float8 trains its arms alike, and keeps the runs that are done."""

from __future__ import annotations

import json

from benchmarks import float8_convergence
from tests import markdown


def test_the_table_of_the_docs_is_that_of_the_committed_runs() -> None:
    page = (markdown.ROOT / "docs" / "float8.md").read_text()
    path = float8_convergence.RESULTS / "float8_convergence.json"
    for row in json.loads(path.read_text())["arms"]:
        if "end" in row:
            end = f"{row['seeds']} | {row['end']:.3f} | {row['end spread']:.3f} |"
            (line,) = (x for x in page.splitlines() if f"| {end}" in x)
            assert line.startswith(f"| {row['arm']} | {row['gpu']} |"), line
            assert row["arm"] == "bf16" or f"| {row['end - bf16']:.3f} |" in line, line
