"""The files and names that the documentation for contributors gives are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ligermodels"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# What a page's reader replaces or makes: the op of the example, a placeholder in capitals.
EXAMPLES = re.compile(r"softcap|[A-Z]{2}")


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def rows(start: str) -> list[list[str]]:
    """The cells of the first table after a line of the architecture page."""
    lines = ARCHITECTURE[ARCHITECTURE.index(start) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return [line.strip("| ").split(" | ") for line in lines[first + 2 : last]]


def names_in(file: Path) -> set[str]:
    """Functions and classes of a file, and their methods with and without the class."""
    found = {file.stem}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            found |= methods | {f"{node.name}.{name}" for name in methods}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_exist(page: Path) -> None:
    """In prose and in commands, from the root of the repository or of the package."""
    paths = re.findall(r"(?<![\w/.>*-])(?:[\w.]+/)+\w+\.py\b", page.read_text(encoding="utf-8"))
    missing = [
        path
        for path in dict.fromkeys(paths)
        if not EXAMPLES.search(path) and not any((top / path).is_file() for top in (ROOT, PACKAGE))
    ]
    assert not missing


@pytest.mark.parametrize(
    "table", ["## The way of a batch", "From a file to a parameter", "And back, in"]
)
def test_functions_are_in_the_files_beside_them(table: str) -> None:
    missing = []
    for _, text, files in rows(table):
        paths = [PACKAGE / path for path in quoted(files)]
        assert paths and all(path.is_file() for path in paths), files
        known = set().union(*map(names_in, paths))
        missing += [name for name in quoted(text) if name[-1] != "/" and name not in known]
    assert not missing


def test_rooms_hold_what_is_said_of_them() -> None:
    missing = []
    for room, text in rows("## The rooms"):
        (path,) = quoted(room)
        assert (PACKAGE / path).exists(), path
        known = set().union(*map(names_in, (PACKAGE / path).rglob("*.py")))
        for name in quoted(text):
            if name.endswith("/"):
                assert (PACKAGE / name).is_dir(), name
            elif not name.startswith("nn.") and name.removesuffix("()").split(".")[-1] not in known:
                missing.append(name)
    assert not missing
