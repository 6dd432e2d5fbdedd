"""docs/trainers.md says of each tool what the tests show."""

from __future__ import annotations

import re

from tests import markdown
from tests.integrations.test_peft_adapters import REFUSED

PAGE = (markdown.ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
FOLDERS = ("integrations", "converters")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table with a heading in its first column."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_every_row_names_a_test() -> None:
    found = {
        name
        for folder in FOLDERS
        for path in (markdown.ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    named = [row[-1].strip("`") for row in rows("tool")]
    assert len(named) > 20 and set(named) <= found


def test_the_methods_that_do_not_work_are_listed() -> None:
    assert rows("method") == [[f"`{name}`", why] for name, why in sorted(REFUSED.items())]
