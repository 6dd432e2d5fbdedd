"""The Makefile names every file whose tests need the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_makefile_names_the_files_with_tests_for_the_interpreter() -> None:
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "INTERPRETED :=" in x)
    named = [ROOT / name for name in line.split()[2:]]
    marked = re.compile(r"^@pytest\.mark\.interpreter|conftest import .*\bPLACES", re.M)
    for path in (ROOT / "tests").rglob("test_*.py"):
        if marked.search(path.read_text(encoding="utf-8")):
            assert any(path == one or one in path.parents for one in named), path
