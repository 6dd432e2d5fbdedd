"""Imports go one way, and the package costs nothing until it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ligermodels"

# Room -> the rooms and modules of this package that it may import.
ALLOWED = {
    "kernels": {"kernels"},
    "layers": {"kernels", "layers"},
    "converters": {"converters", "errors"},
}
NEVER_IN_THE_CORE = {"transformers", "trl", "peft", "liger_kernel"}


def room_of(module: str) -> str | None:
    """The room or top-level module of this package, None for anybody else's."""
    parts = module.split(".")
    if parts[0] != "ligermodels":
        return None
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Every module a file imports, at its top or in a function, with the line."""
    found = []
    package = ["ligermodels", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.append((node.lineno, node.args[0].value))
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_one_way(room) -> None:
    assert files(PACKAGE / room)
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in files(PACKAGE / room)
        for line, module in imports_of(path)
        if room_of(module) is not None and room_of(module) not in ALLOWED[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_models_know_no_command_line() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in files(PACKAGE / "models")
        for line, module in imports_of(path)
        if room_of(module) in {"cli", "finetune", "data"}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_companion_package_is_imported_at_the_top() -> None:
    wrong = []
    for path in files(PACKAGE):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            wrong += [f"{path.name}: {n}" for n in names if n.split(".")[0] in NEVER_IN_THE_CORE]
    assert not wrong


def test_rooms_are_not_importable_from_the_top() -> None:
    """`kernels` is a name that transformers itself tries."""
    for room in ("kernels", "layers", "converters", "models"):
        assert not (PACKAGE.parent / room).exists()


MODULES = [
    "ligermodels",
    "ligermodels.kernels",
    "ligermodels.layers",
    "ligermodels.models",
    "ligermodels.converters",
    "ligermodels.models.auto",
]


@pytest.mark.parametrize("module", MODULES)
def test_importing_takes_neither_triton_nor_transformers(module) -> None:
    script = (
        "import sys\n"
        f"import {module}\n"
        "names = ('transformers', 'trl', 'peft', 'liger_kernel')\n"
        "wrong = [n for n in names if n in sys.modules]\n"
        # torch itself may look for triton; what must not be there are our own kernels.
        "wrong += [n for n in sys.modules if n.startswith('ligermodels.kernels.triton')]\n"
        "torch_only = set(sys.modules)\n"
        "print(wrong, 'triton' in sys.modules, 'torch._inductor' in sys.modules)\n"
        "if 'torch' in sys.modules:\n"
        "    import torch; print(torch.cuda.is_initialized())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "[] False False", lines[0]
    assert lines[1:] in ([], ["False"])


def test_every_public_name_can_be_had() -> None:
    import ligermodels

    for name in ligermodels.__all__:
        assert getattr(ligermodels, name) is not None
    assert set(ligermodels.__all__) <= set(dir(ligermodels))
