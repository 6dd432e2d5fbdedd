"""Imports go one way, and importing the package loads nothing that is not used yet."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from docs import rooms
from docs.rooms import PACKAGE, STANDS_ON, files

NEVER_IN_THE_CORE = {"transformers", "trl", "peft", "liger_kernel"}


def test_every_room_has_its_place() -> None:
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert {*found, "errors", "pictures", "progress", "ranks"} == set(STANDS_ON)
    loose = {path.name for path in PACKAGE.glob("*.py")}
    assert loose == {
        *("__init__.py", "__main__.py", "errors.py", "pictures.py", "progress.py", "public.py"),
        "ranks.py",
    }


def test_imports_go_one_way() -> None:
    """Imports for types alone and imports inside functions count as well."""
    wrong = rooms.against_the_order()
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert rooms.circles(rooms.module_graph()) == []


def test_every_file_that_finds_modules_by_itself_is_listed() -> None:
    """The arrows leave out their imports; models.auto imports the families on demand."""
    assert rooms.finders() == rooms.FINDERS


def test_every_exception_is_an_import_inside_a_function() -> None:
    for file, room in rooms.EXCEPTIONS:
        path = PACKAGE / file
        top = ast.parse(path.read_text(encoding="utf-8")).body
        lines = {node.lineno for node in top if isinstance(node, (ast.Import, ast.ImportFrom))}
        found = [line for line, name in rooms.imports_of(path) if rooms.room_of(name) == room]
        assert found and lines.isdisjoint(found), (file, room)


def test_the_picture_of_the_rooms_is_current() -> None:
    """`python docs/rooms.py` draws the picture."""
    page = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.with_current_picture(page) == page


def test_no_companion_package_is_imported_at_the_top() -> None:
    companion = re.compile(rf"^(?:import|from) (?:{'|'.join(NEVER_IN_THE_CORE)})\b", re.M)
    core = set(files(PACKAGE)) - set(files(PACKAGE / "integrations"))
    assert not [path for path in core if companion.search(path.read_text(encoding="utf-8"))]


def test_what_the_core_imports_is_a_dependency() -> None:
    """Imports inside functions may be of extras, and integrations name what they lack."""
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.partition("\ndependencies = [")[2].partition("\n]")[0]
    named = re.findall(r'^    "([\w-]+)', listed, re.M)
    ours = {{"pyyaml": "yaml"}.get(name, name.replace("-", "_")) for name in named}
    ours |= {"ligermodels", *sys.stdlib_module_names}
    for path in set(files(PACKAGE)) - set(files(PACKAGE / "integrations")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= ours, path


def test_rooms_are_not_importable_from_the_top() -> None:
    """transformers itself tries to import a package named `kernels`."""
    for room in STANDS_ON:
        assert not (PACKAGE.parent / room).exists()


MODULES = ["ligermodels", *(f"ligermodels.{room}" for room in STANDS_ON)]


def test_importing_takes_neither_triton_nor_transformers() -> None:
    """torch is imported once, and each module in a fork of that process."""
    script = (
        "import os, sys, traceback, torch\n"
        # torch itself may look for triton; our own kernels must not be there.
        "wrong = ('transformers', 'trl', 'peft', 'liger_kernel', 'triton', 'torch._inductor')\n"
        "wrong += ('ligermodels.kernels.triton',)\n"
        f"for module in {MODULES!r}:\n"
        "    if os.fork() == 0:\n"
        "        status = 1\n"
        "        try:\n"
        "            __import__(module)\n"
        "            found = [n for n in sys.modules if n in wrong or n.startswith(wrong[-1])]\n"
        "            assert not found, (module, found)\n"
        "            assert not torch.cuda.is_initialized(), module\n"
        "            status = 0\n"
        "        except BaseException:\n"
        "            traceback.print_exc()\n"
        "        os._exit(status)\n"
        "    if os.wait()[1]:\n"
        "        sys.exit(f'{module} failed')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
