"""The line on stderr that shows what a process is doing: one bar at a time, which rich draws.

What takes long runs inside of `stage`, or iterates over `track`. A stage inside of another takes
its place on the line until it ends. On a terminal the line is a bar that moves. Elsewhere a stage
writes a line without colour when ten seconds have passed since its last one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

_INTERVAL = 10.0  # seconds between the lines where no bar can move
_HIDDEN = object()
_display: Any = None  # rich's, of the outermost stage that has begun, or _HIDDEN


@contextlib.contextmanager
def stage(
    what: str, total: int | None = None, *, done: int = 0, shows: bool | None = None
) -> Iterator[Callable[..., None]]:
    """Show what is being done within the context, and yield a function that counts.

    The function is called with the number of things that were done since the last call, by default
    1, and with a text that stands behind their sum.

    Args:
        what: such as "evaluating".
        total: the number of things to do, if it is known.
        done: how many of them were done before.
        shows: whether anything is shown; None is yes on a terminal. A stage inside of another shows
            what that one shows.
    """
    global _display
    outer = _display
    if outer is None:
        _display = _new_display() if shows or (shows is None and _is_terminal()) else _HIDDEN
    try:
        if _display is _HIDDEN:
            yield lambda *_: None
            return
        draws = outer is None and not _display.disable
        with _display if draws else contextlib.nullcontext(), _task(what, total, done) as advance:
            yield advance
    finally:
        # Of two iterators, the one that began first may end first, and with it the display of both.
        if outer is None:
            _display = None


def track(
    items: Iterable[Item], what: str, total: int | None = None, shows: bool | None = None
) -> Iterator[Item]:
    """Iterate over things as a stage that counts them; the arguments are those of `stage`."""
    with stage(what, total, shows=shows) as advance:
        for item in items:
            yield item
            advance()


def say(text: str) -> None:
    """Write a line on stderr, above the bar, unless the stage that has begun shows nothing."""
    if _display not in (None, _HIDDEN):
        print(text, file=sys.stderr)


def _is_terminal() -> bool:
    return sys.stderr.isatty()


def _new_display() -> Any:
    """Return a display of rich that shows only the innermost stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Remaining

    class Innermost(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks[-1:])

    return Innermost(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        Remaining(),
        console=Console(stderr=True),
        disable=not _is_terminal(),
        expand=True,
        refresh_per_second=4,
        speed_estimate_period=600,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )


@contextlib.contextmanager
def _task(what: str, total: int | None, done: int) -> Iterator[Callable[..., None]]:
    display, written = _display, time.monotonic()

    def counted(text: str = "") -> str:
        return f"{done:,}{f'/{total:,}' if total else ''}  {text}".rstrip()

    def advance(count: int = 1, text: str = "") -> None:
        nonlocal done, written
        done += count
        display.update(task, completed=done, text=counted(text))
        if display.disable and time.monotonic() - written > _INTERVAL:
            written = time.monotonic()
            print(f"{what} {counted(text)}", file=sys.stderr)

    task = display.add_task(what, total=total, completed=done, text=counted() if total else "")
    try:
        yield advance
    finally:
        display.remove_task(task)
