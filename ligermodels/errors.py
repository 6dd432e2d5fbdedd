"""The errors ligermodels raises for what a user did, each also the builtin kind one would expect.

The first line of a message states the fault with the file and the key it was found at; a list of
names that follows holds at most ten of them and a count.
"""

from collections.abc import Iterable


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


def listing(names: Iterable[str], limit: int = 10) -> str:
    """The names one per line, indented, cut after `limit` with a count of the rest."""
    names = list(names)
    lines = [f"  {name}" for name in names[:limit]]
    if len(names) > limit:
        lines.append(f"  ... and {len(names) - limit} more")
    return "\n".join(lines)
