"""Sections of docstrings that stand on one line, such as `Args: x (batch, seq)`, for the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"^(Args|Returns|Raises|Source|Attributes): (?=\S)", re.MULTILINE)


class OneLineSections(griffe.Extension):
    """Makes each of them a paragraph with a bold name: the parser knows only longer sections."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _LINE.sub(r"\n**\1:** ", obj.docstring.value)
