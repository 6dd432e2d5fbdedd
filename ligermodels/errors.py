"""The errors ligermodels raises for what a user did, each also the builtin kind one would expect.

The first line of a message states the fault with the file and the key it was found at; a list of
names that follows holds at most ten of them and a count.
"""

import reprlib
from collections.abc import Iterable
from typing import Any


class LigerError(Exception):
    """Base of every error ligermodels raises on purpose."""


class ConfigError(LigerError, ValueError):
    """A configuration that is malformed, contradictory, or asks for something not implemented."""


class CheckpointError(LigerError, ValueError):
    """A checkpoint that cannot be found, is damaged, or does not hold what its config promises."""


class DataError(LigerError, ValueError):
    """Training data that cannot be read, or holds nothing to learn from."""


class SaveError(LigerError, OSError):
    """A checkpoint that could not be written; what was there before is still there."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxlevel = 3


def shown(value: Any) -> str:
    """`repr` for a message: what a hostile file says is cut to a line of a terminal or two."""
    return _SHORT.repr(value)


def printable(name: str) -> str:
    """A name as it is, unless that would not fit or would upset a terminal; then as `shown`."""
    return name if len(name) <= 300 and name.isprintable() else shown(name)


def listing(names: Iterable[str], limit: int = 10) -> str:
    """The names one per line, indented, cut after `limit` with a count of the rest."""
    names = list(names)
    lines = [f"  {printable(name)}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"  ... and {len(names) - limit} more")
    return "\n".join(lines)
