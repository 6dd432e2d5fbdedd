"""The table of faults names attacks that exist, and counts what was counted."""

from __future__ import annotations

import json
from pathlib import Path

from tests.attack.__main__ import load_attacks
from tests.attack.harness import ATTACKS
from tests.attack.table import FOUND, Found, Tally, compare, markdown

load_attacks()


def test_each_fault_has_an_attack() -> None:
    numbers = {one.name: one.fault for one in ATTACKS}
    assert {fault.attack for fault in FOUND} <= set(numbers)
    assert {fault.number for fault in FOUND} == set(range(1, 19))
    assert len(FOUND) == len({(fault.attack, fault.label) for fault in FOUND})


def test_counts_are_added_up(tmp_path: Path) -> None:
    name = "threads_save_to_one_folder"
    row = {"group": "A", "attack": name, "runs": 3, "faults": 1, "skipped": 2}
    labels = {
        "by_label": {"each save succeeds": [2, 1], "a save without an error is whole": [1, 0]}
    }
    file = tmp_path / "counts.json"
    file.write_text(json.dumps([row | labels]))
    tally = Tally.read([("1234567", file), ("89abcde", file)])
    assert tally.by_group() == {"A": [6, 2]}
    assert tally.of(Found(1, "", name)) == [6, 2]
    assert tally.of(Found(1, "", name, "a save*")) == [2, 0]
    assert tally.of(Found(1, "", "another")) == [0, 0]
    found = compare(tally, tally)
    assert found["skipped"] == {name: [4, 4]}
    page = markdown(found)
    assert f"| after | 89abcde | 1 of 3 |{' not run |' * 4}" in page
    assert f"| 1 | {FOUND[0].fault} | `{name}` (each save succeeds) | 2 of 4 | 2 of 4 |" in page


def test_the_page_is_that_of_the_committed_counts() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    found = json.loads((results / "attacks.json").read_text())
    assert markdown(found) == (results / "attacks.md").read_text()
    assert all(row["before"][1] and row["after"][0] for row in found["faults"])
