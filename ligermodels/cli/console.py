"""What a command shows in the terminal besides its result: rows of a name and a value."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def show(title: str, rows: Mapping[str, str]) -> None:
    """Print a title and rows on stderr: in colour on a terminal, as plain text elsewhere.

    A long value is not cut into lines, so that a path or a command can be copied.
    """
    from rich.console import Console
    from rich.text import Text

    console, width = Console(file=sys.stderr, highlight=False), max(map(len, rows)) + 2
    console.print(Text(title, style="bold"))
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<{width}}", "cyan"), value), soft_wrap=True)
