"""The errors that ligermodels raises for faulty input, and helpers for their messages.

Each error is also a ValueError or an OSError. The first line of a message states the fault with its
file and key. A list of at most ten names may follow, with a count of the other names.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any


class LigerError(Exception):
    """The base class of the errors that ligermodels raises on purpose.

    Attributes:
        is_repeated: whether another process of the same run has the same error, and reports it.
    """

    is_repeated = False


class ConfigError(LigerError, ValueError):
    """A configuration that is malformed, contradictory, or asks for something not implemented."""


class CheckpointError(LigerError, ValueError):
    """A checkpoint that cannot be found, is damaged, or does not hold what its config asks for."""


class DataError(LigerError, ValueError):
    """Training data that cannot be read, or that holds no tokens to train on."""


class SaveError(LigerError, OSError):
    """A file that could not be written. A folder that a save replaces keeps its old content."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxlevel = 3


def short_repr(value: Any) -> str:
    """Return the `repr` of a value for a message, cut to a line or two.

    The value may come from a hostile file, and its whole `repr` may be very long.
    """
    return _SHORT.repr(value)


def printable(name: str) -> str:
    """Return a name for a message, by `short_repr` if it is too long or not printable."""
    return name if len(name) <= 300 and name.isprintable() else short_repr(name)


def listing(names: Iterable[str]) -> str:
    """Return at most ten names, indented and one per line, and a count of the other names."""
    names = list(names)
    lines = [f"  {printable(name)}" for name in names[:10]]
    if len(names) > 10:
        lines.append(f"  ... and {len(names) - 10} more")
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 row" or "2,000 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class if there is no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


# What a word of another program means, where such a name is known.
_MEANINGS = {
    "torch_dtype": "dtype",
    "device_map": "device",
    "use_auth_token": "token",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "streamer": "callback",
}


def did_you_mean(word: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'x'?" with the known word that `word` stands for, or "".

    It may be written otherwise, or be one of the word's parts.

    Args: others: names in other programs, and the known word that each means, with _ for -.
    """
    import difflib

    words = {each.lstrip("-"): each for each in known}
    word = word.lstrip("-")
    parts = {name: re.split("[-_]", name) for name in words}
    theirs = {**_MEANINGS, **(others or {})}.get(word.replace("-", "_"))
    found = [name for name in words if name.replace("-", "_") == theirs]
    found += [name for name in words if word in parts[name]]
    near = difflib.get_close_matches(word, words, n=3, cutoff=0.75)
    found += [name for name in near if _is_misspelt(word, name)]
    return f"; did you mean {words[found[0]]!r}?" if found else ""


def _is_misspelt(word: str, name: str) -> bool:
    """Return whether no part of a word is another one: min_length does not mean max_length."""
    import difflib

    mine, theirs = (re.split("[-_.]", each) for each in (word, name))
    return len(mine) != len(theirs) or all(
        sorted(a) == sorted(b) or difflib.SequenceMatcher(None, a, b).ratio() > 0.7
        for a, b in zip(mine, theirs)
    )
