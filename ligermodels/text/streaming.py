"""Text of tokens that arrive one at a time."""

from collections.abc import Iterable
from typing import Protocol


class Decoder(Protocol):
    """What streaming asks of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class TextStream:
    """Turns tokens into pieces of text as they come, and never splits a character.

    Args:
        tokenizer: its `decode` is used.
        context: the ids before the first one. Their text is not repeated, but a word that follows
            them keeps its leading space.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Decoder, context: Iterable[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # Each token decodes a short window alone: some ids whose text is out, and those after them.
        # The former are there because a leading space depends on something being before it.
        self.ids = list(context)[-8:]
        self._mark_shown()

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, self.skip_special_tokens)

    def _mark_shown(self) -> None:
        self.shown_ids, self.shown_length = len(self.ids), len(self._decode())

    def push(self, token: int) -> str:
        """The text that has become final with this token; "" within a character of several."""
        self.ids.append(int(token))
        text = self._decode()
        # An incomplete character reads as U+FFFD until its last byte is there.
        if len(text) <= self.shown_length or text.endswith("\ufffd"):
            return ""
        new = text[self.shown_length :]
        self.ids = self.ids[self.shown_ids :]
        self._mark_shown()
        return new

    def finish(self) -> str:
        """The text that was held back: a character that stays incomplete is U+FFFD."""
        new = self._decode()[self.shown_length :]
        self._mark_shown()
        return new
