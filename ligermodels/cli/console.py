"""What a command shows in the terminal besides its result: rows of a name and a value."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def show(title: str, rows: Mapping[str, str]) -> None:
    """Print a title and rows on stderr: in colour on a terminal, as plain text elsewhere."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=False)
    console.print(title, style="bold")
    console.print(table)
