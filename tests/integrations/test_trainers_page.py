"""docs/trainers.md says of each tool what the tests show."""

from __future__ import annotations

import re

from tests import markdown

PAGE = (markdown.ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
EXTRAS = ("trainers", "tools")
FOLDERS = ("integrations", "adapters", "converters", "examples")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table with a heading in its first column."""
    lines = PAGE[PAGE.index(f"\n| {heading} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_every_row_names_a_test() -> None:
    found = {
        name
        for folder in FOLDERS
        for path in (markdown.ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    for heading in ("tool", "what"):
        named = [row[-1].strip("`") for row in rows(heading)]
        assert len(named) > 10 and set(named) <= found


def test_refusals_have_these_words() -> None:
    package = "".join(
        path.read_text(encoding="utf-8") for path in (markdown.ROOT / "ligermodels").rglob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", package)
    quoted = re.findall(r'refused: "([^"]+)"', PAGE)
    assert len(quoted) > 10 and [words for words in quoted if words not in source] == []


def test_every_example_is_listed() -> None:
    """The file `rows.py` is what the others share."""
    files = (markdown.ROOT / "examples" / "trainers").glob("*.py")
    assert {f"`{file.name}`" for file in files} - {"`rows.py`"} == {row[0] for row in rows("file")}


def test_the_extras_have_the_versions_that_are_tested() -> None:
    project = (markdown.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tested = (markdown.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for extra in EXTRAS:
        listed = re.search(rf"^{extra} = \[\n(.*?)^\]", project, re.M | re.S)
        assert listed is not None
        named = re.findall(r'^    "([^";]+)', listed[1], re.M)
        assert len(named) > 4 and {re.sub(r"\[.*\]", "", each) for each in named} <= {*tested}
