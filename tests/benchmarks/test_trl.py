"""The figures of TRL's trainers on the page are those of the committed run."""

from __future__ import annotations

import json

from benchmarks.common import RESULTS
from tests import markdown

PAGE = (markdown.ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
NAMES = {"llama-3-8b": "Llama-3-8B", "llama-3.2-1b": "Llama-3.2-1B"}
ORDER = ("transformers", "transformers + liger", "ligermodels", "ligermodels, planned")


def test_the_figures_on_the_page_are_those_of_the_committed_run() -> None:
    lines: dict[str, dict[str, str]] = {}
    for row in json.loads((RESULTS / "trl.json").read_text())["rows"]:
        start = f"| {row['trainer']} | {NAMES[row['model']]} | {row['batch x seq']}"
        shown = f"{row['ms']:.0f} / {row['peak GiB']:.1f}"
        lines.setdefault(start, {})[row["implementation"]] = shown
    assert lines
    for start, shown in lines.items():
        cells = [start, *(shown.get(name, "not measured") for name in ORDER)]
        assert " | ".join(cells) + " |" in PAGE
