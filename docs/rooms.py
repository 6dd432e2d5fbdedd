"""The rooms of the package and the imports between them, read from the code.

`python docs/rooms.py` updates the picture in docs/architecture.md. The tests check that the picture
is current and that imports go one way.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ligermodels"
PAGE = ROOT / "docs" / "architecture.md"

# Room -> the rooms directly below it. A room may import these, and every room below them.
STANDS_ON: dict[str, tuple[str, ...]] = {
    "errors": (),
    "pictures": ("errors",),
    "ranks": ("errors",),
    "kernels": ("errors",),
    "layers": ("kernels",),
    "memory": ("layers", "pictures", "ranks"),
    "progress": ("errors",),
    "converters": ("progress",),
    "float8": ("layers",),
    "losses": ("layers",),
    "models": ("memory", "float8", "losses", "converters"),
    "text": ("converters",),
    "generation": ("heads", "text"),
    "heads": ("models",),
    "adapters": ("models",),
    "parallel": ("models",),
    "training": ("generation", "adapters", "parallel", "losses"),
    "integrations": ("training",),
    "checks": ("integrations",),
    "cli": ("checks",),
}
# Imports against the order. Each is inside a function, so it happens only when it is called.
EXCEPTIONS = {
    ("models/base.py", "generation"): "model.generate",
    ("models/auto.py", "adapters"): "AutoLiger.from_hf on the folder of an adapter",
    ("training/data.py", "integrations"): "data sets and tables, by the library datasets",
    ("training/reports.py", "integrations"): "loggers by name, tasks of lm-eval",
}
# Files that compute the names of the modules they import: those in a folder, or what a user names.
FINDERS = {
    "__init__.py",
    "kernels/reference/__init__.py",
    "kernels/triton/__init__.py",
    "models/auto.py",
    "cli/options.py",
    "integrations/loggers.py",
    "training/grpo.py",
    "training/losses.py",
}


def below(room: str) -> set[str]:
    """Return every room that `room` may import, including itself."""
    return {room}.union(*(below(other) for other in STANDS_ON[room]))


def files(folder: Path = PACKAGE) -> list[Path]:
    """Return the Python files of a folder and its subfolders."""
    return sorted(folder.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the dotted module name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """Return the room of a module, "" for the package itself, or None for other packages."""
    parts = module.split(".")
    if parts[0] != "ligermodels":
        return None
    return parts[1] if len(parts) > 1 else ""


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return every node of a file's syntax tree."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Return every (line, module or name) that a file imports.

    Imports in functions, and those only for types, count.
    """
    found = []
    package = ["ligermodels", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes_of(path):
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


def finders() -> set[str]:
    """Return the files that call import_module with a name that is not a literal."""
    return {
        str(path.relative_to(PACKAGE))
        for path in files()
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module"
        and not isinstance(node.args[0], ast.Constant)
    }


def module_graph() -> dict[str, set[str]]:
    """Return a mapping from each module to the modules of the package that it imports.

    Imports only for types count. The package's own `__init__` is left out, because it imports a
    public name only when the name is used.
    """
    modules = {module_of(path): path for path in files()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        if module == "ligermodels":
            continue
        graph[module] = set()
        for _, name in imports_of(path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            lazy = (str(path.relative_to(PACKAGE)), room_of(name) or "") in EXCEPTIONS
            if name not in ("", "ligermodels", module) and not lazy:
                graph[module].add(name)
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules of each import cycle, that is, of each strongly connected component."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [*graph.get(start, ())]
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += graph.get(module, ())
        return seen

    reach = {module: reachable(module) for module in graph}
    found = {
        tuple(sorted(m for m in reach[module] if module in reach[m]))
        for module in graph
        if module in reach[module]
    }
    return [list(circle) for circle in sorted(found)]


def against_the_order() -> list[str]:
    """Return the imports from a room to a room that STANDS_ON does not allow."""
    wrong = []
    for path in files():
        room = room_of(module_of(path))
        if not room or room in ("__main__", "public"):
            continue
        here = str(path.relative_to(PACKAGE))
        for line, name in imports_of(path):
            other = room_of(name)
            if other is None or other == "__version__" or other in below(room):
                continue
            if (here, other) not in EXCEPTIONS:
                wrong.append(f"{here}:{line} imports {name}")
    return wrong


def picture() -> str:
    """Return a line of rooms for each level, the highest first: a room imports lower levels."""
    graph: dict[str, set[str]] = {room: set() for room in STANDS_ON}
    for module, imported in module_graph().items():
        room = room_of(module) or ""
        if room in graph:
            others = {room_of(other) or "" for other in imported}
            graph[room] |= (others & graph.keys()) - {room}

    def level(room: str) -> int:
        return 1 + max((level(other) for other in graph[room]), default=0)

    levels = {room: level(room) for room in graph}
    lines = [
        "  ".join(room for room in graph if levels[room] == each)
        for each in sorted(set(levels.values()), reverse=True)
    ]
    return "\n".join(["```text", *lines, "```"])


def with_current_picture(page: str) -> str:
    """Return the page with an updated picture between its markers."""
    begin, end = "<!-- drawn by docs/rooms.py -->", "<!-- end of the drawing -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{PAGE}: expected the line {begin}, and after it the line {end}")
    return f"{before}{begin}\n{picture()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_current_picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
