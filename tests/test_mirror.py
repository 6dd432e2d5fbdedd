"""tests/ mirrors ligermodels/: each module has a test file of its name, or a reason here."""

from __future__ import annotations

import re
from pathlib import Path

from ligermodels import cli
from ligermodels.models.auto import families

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "ligermodels", ROOT / "tests"
# Modules and folders without a mirror. The values say which tests cover them.
ELSEWHERE = {
    "__main__.py": "tests/cli/test_finetune.py starts the module",
    "converters/dtypes.py": "it is a table, which the loads and saves read",
    "kernels/reference": "tests/kernels/test_<op>.py",
    "kernels/triton": "tests/kernels/test_<op>.py",
}


def test_the_makefile_names_the_files_with_tests_for_the_interpreter() -> None:
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "INTERPRETED :=" in x)
    named = [ROOT / name for name in line.split()[2:]]
    marked = re.compile(r"^@pytest\.mark\.interpreter|conftest import .*\bPLACES", re.M)
    for path in TESTS.rglob("test_*.py"):
        if marked.search(path.read_text(encoding="utf-8")):
            assert any(path == one or one in path.parents for one in named), path


def mirror(module: Path) -> Path:
    return TESTS / module.parent / f"test_{module.name}"


def test_each_module_has_a_test_file_of_its_name() -> None:
    # Tests of all families take a family as a parameter: see tests/models/test_parity.py.
    own = {f"models/{cls.__module__.rpartition('.')[2]}.py" for cls in families().values()}
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        covered = {str(module), *map(str, module.parents)} & (own | ELSEWHERE.keys())
        if module.name != "__init__.py" and not covered and not mirror(module).is_file():
            missing.append(str(module))
    assert not missing, f"these have no test file of their name and are not in ELSEWHERE: {missing}"


def test_every_reason_names_a_file_that_exists() -> None:
    assert [name for name in ELSEWHERE if not (PACKAGE / name).exists()] == []


def test_each_command_has_its_test_file() -> None:
    names = [module.__name__.rpartition(".")[2] for module in cli.COMMANDS]
    assert [name for name in names if not (TESTS / "cli" / f"test_{name}.py").is_file()] == []
