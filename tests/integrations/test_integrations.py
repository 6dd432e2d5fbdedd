"""A part of the library that needs another one says how to install it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ligermodels import integrations
from ligermodels.integrations import EXTRAS

FOLDER = Path(integrations.__file__).parent


def installed_by() -> dict[str, set[str]]:
    """Return the extras that install each library, by the name with which it is imported.

    A library that is installed without an extra has none, also where an extra asks for a newer one.
    """
    found: dict[str, set[str]] = {}
    always = set()
    for line in metadata.requires("ligermodels") or ():
        name = re.split(r"[^\w-]", line)[0].replace("-", "_")
        extras = re.findall(r"extra == .(\w+).", line)
        found.setdefault(name, set()).update(extras)
        if not extras:
            always.add(name)
    return {name: extras for name, extras in found.items() if name not in always}


def imported(file: Path) -> set[str]:
    """Return the libraries of extras that a module imports when it is imported itself."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return {name for name in found if installed_by().get(name)} - {"ligermodels"}


CASES = [(file.stem, name) for file in sorted(FOLDER.glob("*.py")) for name in imported(file)]


def test_the_extras_install_what_is_imported() -> None:
    assert {library for _, library in CASES} == EXTRAS.keys()
    assert all(extra in installed_by()[library] for library, extra in EXTRAS.items())


@pytest.mark.parametrize(("module", "library"), sorted(CASES))
def test_a_missing_library_is_named_with_the_way_to_install_it(
    module: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"ligermodels.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "ligermodels\[\w+\]"') as caught:
        importlib.import_module(name)
    assert caught.value.name == library and str(caught.value).startswith(f"{library} is not")
