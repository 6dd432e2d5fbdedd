"""What the site's parser of docstrings does not know: sections on one line, and grouped names."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"^(Args|Returns|Raises|Source|Attributes): (?=\S)", re.MULTILINE)
_SECTION = re.compile(r"^(?:Args|Attributes):\n(?: {4}.*\n?)+", re.MULTILINE)
_GROUP = re.compile(r"^ {4}(\w+(?:, \w+)+)(:.*(?:\n {8}.*)*)", re.MULTILINE)


class OneLineSections(griffe.Extension):
    """Makes a section on one line, such as `Args: x (batch, seq)`, a paragraph with a bold name.

    `q_norm, k_norm: text` becomes an entry for each name, which then has its type and default.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _SECTION.sub(lambda found: _GROUP.sub(_entries, found[0]), obj.docstring.value)
            obj.docstring.value = _LINE.sub(r"\n**\1:** ", text)


def _entries(group: re.Match[str]) -> str:
    return "\n".join(f"    {name}{group[2]}" for name in group[1].split(", "))
