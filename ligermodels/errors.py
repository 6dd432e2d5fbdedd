"""The errors that ligermodels raises for what a user did, and helpers for their messages.

Each is also of the builtin kind that one would expect. The first line of a message states the fault
with its file and key; a list of names may follow, of at most ten and a count of the rest.
"""

import reprlib
from collections.abc import Iterable
from typing import Any


class LigerError(Exception):
    """Base of every error ligermodels raises on purpose."""


class ConfigError(LigerError, ValueError):
    """A configuration that is malformed, contradictory, or asks for something not implemented."""


class CheckpointError(LigerError, ValueError):
    """A checkpoint that cannot be found, is damaged, or does not hold what its config asks for."""


class DataError(LigerError, ValueError):
    """Training data that cannot be read, or that holds nothing to learn from."""


class SaveError(LigerError, OSError):
    """A checkpoint that could not be written; what was there before is still there."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """`repr` for a message, cut to a line or two: the value may come from a hostile file."""
    return _SHORT.repr(value)


def printable(name: str) -> str:
    """A name for a message; one that is too long or not printable as `shown` gives it."""
    return name if len(name) <= 300 and name.isprintable() else shown(name)


def listing(names: Iterable[str], limit: int = 10) -> str:
    """The names one per line, indented, cut after `limit` with a count of the rest."""
    names = list(names)
    lines = [f"  {printable(name)}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"  ... and {len(names) - limit} more")
    return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's kind where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
