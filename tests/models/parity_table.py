"""Run the parity tests and write the errors that they measured into a page of the docs.

    python -m tests.models.parity_table            docs/parity.md, from tests/models/test_parity.py
    python -m tests.models.parity_table --gpu      docs/parity_gpu.md, from tests/gpu

With --families mixtral ..., the rows of other families remain. Further arguments go to pytest (-n 2
runs two processes). The rows of a family are written as soon as all of its tests have passed.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import transformers

from tests.models import parity, zoo

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
GPU_PAGE = ROOT / "docs" / "parity_gpu.md"
Errors = dict[tuple[str, str], dict[str, float]]


class Collector:
    """A pytest plugin that keeps what the tests of every worker recorded.

    Args: passed: called when all tests of a family have passed, with the families so far.
    """

    def __init__(self, passed: Callable[[Collector, list[str]], None] | None = None) -> None:
        self.errors: Errors = {}
        self.ratios: dict[str, tuple[float, float]] = {}
        self.left: dict[str, set[str]] = {}  # family -> its tests that have not passed
        self.failed: set[str] = set()
        self.passed = passed

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.pytest_xdist_node_collection_finished(None, [item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        for test in ids if not self.left else ():
            self.left.setdefault(family_of(test), set()).add(test)

    def pytest_runtest_logreport(self, report: Any) -> None:
        for key, value in report.user_properties:
            if key == "parity":
                family, name, errors = value
                self.errors.setdefault((family, name), {}).update(errors)
            elif key == "bfloat16":
                family, mean, largest = value
                self.ratios[family] = (mean, largest)
        left = self.left.get(family_of(report.nodeid), set())
        if report.skipped or (report.when == "teardown" and report.nodeid not in self.failed):
            left.discard(report.nodeid)
        if report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown" and not left and self.passed is not None:
            self.passed(self, [family for family, tests in self.left.items() if not tests])


def family_of(test: str) -> str:
    """Return the family of a test, whose id is its parameters: family, or family-feature."""
    return test.partition("[")[2].rstrip("]").partition("-")[0]


def cell(column: str, errors: dict[str, float]) -> str:
    """Format an error for the table."""
    if column not in errors:
        return "–"
    if column == "generation":
        return f"{errors[column]:.0f} differ" if errors[column] else "equal"
    if column == "round trip":
        return f"{errors[column]:.0f} changed" if errors[column] else "bitwise"
    return f"{errors[column]:.0e}" if errors[column] else "0"


def line(first: str, errors: dict[str, float]) -> str:
    """Return one row of a table."""
    return f"| {first} | " + " | ".join(cell(column, errors) for column in parity.COLUMNS) + " |"


def heading(first: str) -> list[str]:
    """Return the header lines of a table."""
    return [f"| {first} | {' | '.join(parity.COLUMNS)} |", "|---" * (len(parity.COLUMNS) + 1) + "|"]


def page(text: str, collector: Collector, measures: Collection[str], gpu: bool = False) -> str:
    """Return a page with the text of an old one, and families and features as in the zoo.

    The rows of families that were not measured are those of the old page.
    """
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
    device = f" on one {torch.cuda.get_device_name()}" if gpu else " on a CPU"
    measured = ", ".join(f"{name} {number}" for name, number in versions.items()) + device
    start = "The page was measured with "
    before, _, old = text.partition(start)
    said = f"{measured}."
    if others := [family for family in zoo.FAMILIES if family not in measures]:
        said, *earlier = old.partition("\n\n")[0].splitlines()
        rows_of: dict[str, list[str]] = {}
        for each in earlier:  # The rows of mixtral, gpt_oss were measured with ...
            names, _, how = each.removeprefix("The rows of ").partition(" were measured with ")
            rows_of[how] = [name for name in names.split(", ") if name in others]
        if said != f"{measured}.":
            rows_of.setdefault(f"{measured}.", []).extend(measures)
        for how, names_there in rows_of.items():
            if names_there:
                said += f"\nThe rows of {', '.join(names_there)} were measured with {how}"
    tables = {each[0]: each[4:] for each in map(str.splitlines, old.split("\n## "))}

    def kept(table: str, first: str = "") -> list[str]:
        return [row for row in tables.get(table, []) if row.startswith(f"| {first}")]

    lines = [
        f"{before}{start}{said}",
        "",
        "## The largest error of each family",
        "",
        *heading("family"),
    ]
    for family in zoo.FAMILIES:
        if family in others:
            lines += kept("The largest error of each family", f"{family} ")
            continue
        found = [errors for (one, _), errors in collector.errors.items() if one == family]
        largest = {
            column: max(errors[column] for errors in found if column in errors)
            for column in parity.COLUMNS
            if any(column in errors for errors in found)
        }
        lines.append(line(family, largest))
    lines += [
        *("", "## bfloat16", ""),
        "| family | geometric mean | largest |",
        "|---|---|---|",
    ]
    for family in zoo.FAMILIES:
        if family in others:
            lines += kept("bfloat16", f"{family} ")
        elif family in collector.ratios:
            mean, most = collector.ratios[family]
            lines.append(f"| {family} | {mean:.3f} | {most:.3f} |")
    scale = zoo.REAL if gpu else zoo.TINY
    for family in zoo.FAMILIES:
        if family in others and not kept(family):
            continue
        lines += ["", f"## {family}", "", *heading("feature")]
        if family in others:
            lines += kept(family)
            continue
        for name in zoo.features(family, scale):
            if not gpu or (family, name) in collector.errors:
                lines.append(line(name, collector.errors.get((family, name), {})))
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the tests, write the page of families that pass, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the tests that run on a GPU")
    parser.add_argument("--families", nargs="+", default=zoo.FAMILIES, help="the rows to measure")
    parser.add_argument("--out", type=Path, help="the page to write")
    options, rest = parser.parse_known_args(arguments)
    tests = "tests/gpu/test_parity_on_gpu.py" if options.gpu else "tests/models/test_parity.py"
    out = options.out or (GPU_PAGE if options.gpu else PAGE)
    out.parent.mkdir(parents=True, exist_ok=True)
    old = (GPU_PAGE if options.gpu else PAGE).read_text()

    def write(collector: Collector, passed: list[str]) -> None:
        done = [family for family in zoo.FAMILIES if family in {*passed} & {*options.families}]
        out.write_text(page(old, collector, done, options.gpu))

    collector = Collector(write)
    selection = ["-m", "long or not long"]  # every pair, not the default run's sample
    if options.families != zoo.FAMILIES:
        ids = (f"[{family}- or [{family}]" for family in options.families)
        selection += ["-k", " or ".join(ids)]
    code = pytest.main(["-q", *selection, *rest, str(ROOT / tests)], plugins=[collector])
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
