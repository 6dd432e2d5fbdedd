"""Decode tokens that arrive one at a time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class Decoder(Protocol):
    """The interface that streaming needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class TextStream:
    """A decoder that turns arriving tokens into pieces of text and never splits a character.

    Args:
        tokenizer: the object whose `decode` is called.
        context: the ids before the first pushed token. Their text is not returned again, but a
            word that follows them keeps its leading space.
        skip_special_tokens: whether to leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Decoder, context: Iterable[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # Each push decodes only a short window: some ids whose text was returned already, and the
        # ids after them. The old ids are needed, because a leading space depends on the ids before.
        self.ids = list(context)[-8:]
        self._mark_shown()

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, self.skip_special_tokens)

    def _mark_shown(self) -> None:
        self.shown_ids, self.shown_length = len(self.ids), len(self._decode())

    def push(self, token: int) -> str:
        """Return the text that is now final. It is "" while a character is incomplete."""
        self.ids.append(int(token))
        text = self._decode()
        # An incomplete character decodes to U+FFFD until its last byte is there.
        if len(text) <= self.shown_length or text.endswith("\ufffd"):
            return ""
        new = text[self.shown_length :]
        self.ids = self.ids[self.shown_ids :]
        self._mark_shown()
        return new

    def finish(self) -> str:
        """Return the rest of the text. A character that is still incomplete becomes U+FFFD."""
        new = self._decode()[self.shown_length :]
        self._mark_shown()
        return new


class StopStrings:
    """Finds strings at which the texts of rows end.

    Args:
        tokenizer: the object whose `decode` is called.
        strings: the strings.
        contexts: the ids of each row before the first pushed token.
    """

    def __init__(
        self, tokenizer: Decoder, strings: Sequence[str], contexts: Iterable[Iterable[int]]
    ) -> None:
        self.strings, self.longest = tuple(strings), max(map(len, strings))
        self.streams = [TextStream(tokenizer, context) for context in contexts]
        self.tails = ["" for _ in self.streams]
        self.ended: set[int] = set()

    def push(self, tokens: Iterable[int]) -> list[int]:
        """Take the next token of each row. Return the rows whose texts have ended so far."""
        for row, token in enumerate(tokens):
            if row not in self.ended:
                self.tails[row] += self.streams[row].push(token)
                if any(each in self.tails[row] for each in self.strings):
                    self.ended.add(row)
                self.tails[row] = self.tails[row][-self.longest :]
        return sorted(self.ended)


def until(pieces: Iterable[str], strings: Sequence[str]) -> Iterator[str]:
    """Yield the text of pieces up to the first of some strings. What may begin one waits."""
    text, held = "", max(map(len, strings), default=1) - 1
    for piece in pieces:
        text += piece
        if any(each in text for each in strings):
            break
        if len(text) > held:
            yield text[: len(text) - held]
            text = text[len(text) - held :]
    ends = [text.index(each) for each in strings if each in text]
    if text := text[: min(ends, default=len(text))]:
        yield text


def text_after(
    tokenizer: Decoder, context: Sequence[int], ids: Sequence[int], stop_strings: Sequence[str] = ()
) -> str:
    """Return the text of ids that follow the ids of a context, up to the first of stop_strings."""
    stream = TextStream(tokenizer, context)
    stream.ids += ids
    return "".join(until([stream.finish()], stop_strings))
