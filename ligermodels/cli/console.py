"""How commands print rows of a name and a value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO


def show(title: str, rows: Mapping[str, str], file: TextIO | None = None) -> None:
    """Print a title and rows: in colour on a terminal, as plain text elsewhere.

    A long value is not cut into lines, so that a path or a command can be copied.

    Args: file: where they go; the default is stderr.
    """
    from rich.console import Console
    from rich.text import Text

    console, width = Console(file=file or sys.stderr), max(map(len, rows)) + 2
    console.print(Text(title, style="bold"), soft_wrap=True)
    for name, value in rows.items():
        console.print(Text.assemble((f"{name:<{width}}", "cyan"), value), soft_wrap=True)
