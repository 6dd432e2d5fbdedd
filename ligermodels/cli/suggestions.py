"""Suggest what a user may have meant by a misspelt command, option or value."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known word closest to `word`, or "" if none is close.

    An option may also be meant by its initials, such as --lr, or by one of its parts.
    """
    words = {each.lstrip("-"): each for each in known}
    word = word.lstrip("-")
    parts = {name: name.split("-") for name in words}
    found = [name for name in words if len(parts[name]) > 1 and _initials(parts[name]) == word]
    found += [name for name in words if word in parts[name]]
    found += difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {words[found[0]]!r}?" if found else ""


def _initials(parts: list[str]) -> str:
    return "".join(part[:1] for part in parts)
