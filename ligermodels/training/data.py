"""Training data: text and JSONL files become documents of tokens with a mask for the loss.

`packing` makes the rows of a batch from them. Everything in both is a function of the files, the
tokenizer and a seed, so that a run that was killed finds the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ligermodels.errors import DataError, LigerError, first_line
from ligermodels.text.tokenizer import Tokenizer

JSONL_SUFFIXES = (".jsonl", ".ndjson")
REFUSED_SUFFIXES = (".json", ".parquet", ".arrow", ".csv", ".gz", ".zst", ".zip")


@dataclass(frozen=True)
class Document:
    """One document: `ids` (n,) int32, and `loss_mask` (n,) bool, True where an id is a target.

    A plain text may be cut anywhere. An example with a prompt may not (`divisible` is False),
    because what is cut off would be an answer without its question.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    divisible: bool = True

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """How many ids are targets of the loss."""
        return int(self.loss_mask.sum())


def file_hashes(paths: Sequence[str | Path]) -> dict[str, str]:
    """The SHA-256 of each file by its absolute path."""
    found = {}
    for path in paths:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
        found[str(Path(path).resolve())] = digest.hexdigest()
    return found


def check_files(paths: Sequence[str | Path]) -> list[Path]:
    """The paths as `Path`, each an existing file of a kind that can be read; DataError otherwise.

    Separate from reading, so that a mistyped name is found before a model is downloaded.
    """
    files = [Path(path) for path in paths]
    for file in files:
        if file.is_dir():
            raise DataError(f"{file}: is a folder, a text or JSONL file is needed")
        if not file.is_file():
            raise DataError(f"{file}: no such file")
        if file.suffix.lower() in REFUSED_SUFFIXES:
            raise DataError(
                f"{file}: {file.suffix} files are not read; give plain text, or .jsonl with one "
                "object per line"
            )
    return files


def read_documents(
    paths: Sequence[str | Path], tokenizer: Tokenizer, *, separator: str | None = None
) -> list[Document]:
    """Tokenise files into documents, in file order.

    Names that end in .jsonl or .ndjson hold one object per line, with `text`, with `prompt` and
    `completion`, or with `messages` (a list of role and content, which goes through the chat
    template). Any other file is UTF-8 text: one document, or several between lines that equal
    `separator` ("" separates paragraphs, at blank lines).

    Every document ends with the tokenizer's end-of-text token. Targets are all tokens but the
    first of a text, the completion and its end, and the assistant's turns. Raises DataError naming
    file and line.
    """
    files = check_files(paths)
    encoder = _Encoder(tokenizer)
    documents = []
    for file in files:
        if file.suffix.lower() in JSONL_SUFFIXES:
            documents += list(_read_jsonl(file, encoder))
            continue
        text = _read_text(file)
        if "\0" in text:
            raise DataError(f"{file}: holds NUL characters, so it is not a text file")
        documents += [encoder.text(each) for each in split_text(text, separator)]
    documents = [document for document in documents if document.num_targets]
    if not documents:
        names = ", ".join(str(file) for file in files)
        raise DataError(f"{names}: nothing to train on, every document is empty")
    return documents


def split_text(text: str, separator: str | None) -> list[str]:
    """The documents of a text, cut at lines that equal `separator`; empty ones are left out."""
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if separator is not None and line.strip() == separator.strip():
            parts.append([])
        else:
            parts[-1].append(line)
    documents = ["\n".join(lines).strip("\n") for lines in parts]
    return [document for document in documents if document.strip()]


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line}: not UTF-8 text") from None


def _read_jsonl(file: Path, encoder: _Encoder) -> Iterator[Document]:
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError):
            raise DataError(f"{where}: not JSON that can be read") from None
        document = _record_document(record, where, encoder)
        if document is not None:
            yield document


def _record_document(record: Any, where: str, encoder: _Encoder) -> Document | None:
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, found {_kind(record)}")
    kinds = [kind for kind in ("text", "prompt", "messages") if kind in record]
    if len(kinds) != 1:
        raise DataError(
            f'{where}: expected one of "text", "prompt" with "completion", or "messages"; '
            f"found {', '.join(map(repr, record)) or 'no keys'}"
        )
    if kinds == ["messages"]:
        return encoder.chat(_checked_messages(record["messages"], where), where)
    if kinds == ["text"]:
        text = _checked_string(record, "text", where)
        return encoder.text(text) if text.strip() else None
    prompt = _checked_string(record, "prompt", where)
    return encoder.completion(prompt, _checked_string(record, "completion", where))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def _checked_string(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise DataError(f'{where}: "{key}" is missing')
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f'{where}: "{key}" must be a string, found {_kind(value)}')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f'{where}: "{key}" holds half a surrogate pair') from None
    return value


def _checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: "messages" must be a list with at least one message')
    for message in messages:
        if not isinstance(message, dict):
            raise DataError(f"{where}: a message must be an object, found {_kind(message)}")
        for key in ("role", "content"):
            _checked_string(message, key, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f'{where}: "messages" has no turn of the assistant to learn from')
    return messages


class _Encoder:
    """Texts, completions and chats to documents, with the tokenizer's own special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        bare = tokenizer.encode("a", add_special_tokens=False)
        full = tokenizer.encode("a", add_special_tokens=True)
        # What the tokenizer puts in front (usually a begin token or nothing); what it may put
        # behind is left to `end`, so that a prompt never carries an end token in the middle.
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        self.prefix = full[:start]
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def text(self, text: str) -> Document:
        ids = self.prefix + self._encode(text) + self.end
        return _document(ids, [True] * len(ids), divisible=True)

    def completion(self, prompt: str, completion: str) -> Document:
        ids, loss_mask = self._segments([(prompt, False), (completion, True)])
        ids = self.prefix + ids + self.end
        loss_mask = [False] * len(self.prefix) + loss_mask + [True] * len(self.end)
        return _document(ids, loss_mask, divisible=False)

    def chat(self, messages: list[dict[str, Any]], where: str) -> Document:
        """A conversation through the chat template; targets are what the assistant would write.

        A turn of the assistant begins where the template's generation prompt ends, which is
        where the model takes over when it is asked, and ends where the template ends the turn.
        """
        whole = self._render(messages, False, where)
        segments: list[tuple[str, bool]] = []
        done = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], True, where)
            through = self._render(messages[: i + 1], False, where)
            if not (whole.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"{where}: the chat template renders message {i + 1} differently inside the "
                    "conversation than at its end, so its tokens cannot be told apart; split the "
                    "conversation so that this message is the last"
                )
            segments += [
                (whole[done : len(before)], False),
                (whole[len(before) : len(through)], True),
            ]
            done = len(through)
        segments.append((whole[done:], False))
        ids, loss_mask = self._segments([segment for segment in segments if segment[0]])
        return _document(ids, loss_mask, divisible=False)

    def _render(self, messages: list[dict[str, Any]], generation: bool, where: str) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=generation, tokenize=False
            )
        # A template is a program of the checkpoint's: it raises what it likes.
        except Exception as error:
            if isinstance(error, LigerError) and not messages:
                raise
            raise DataError(f"{where}: the chat template fails: {first_line(error)}") from error

    def _segments(self, segments: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Tokens of the joined segments, and for each whether it lies in a trained one.

        The whole is encoded at once where every boundary is also a boundary between tokens, as
        it nearly always is; else segment by segment, which is how a prompt meets its answer
        when the model generates.
        """
        texts = [text for text, _ in segments]
        ids = self._encode("".join(texts))
        heads = [self._encode(text) for text in accumulate(texts[:-1])]
        if all(ids[: len(head)] == head for head in heads):
            ends = [*map(len, heads), len(ids)]
        else:
            pieces = [self._encode(text) for text in texts]
            ids = [token for piece in pieces for token in piece]
            ends = list(accumulate(map(len, pieces)))
        loss_mask: list[bool] = []
        for (_, trained), end in zip(segments, ends):
            loss_mask += [trained] * (end - len(loss_mask))
        return ids, loss_mask

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _document(ids: list[int], loss_mask: list[bool], divisible: bool) -> Document:
    mask = np.array(loss_mask, dtype=np.bool_)
    mask[:1] = False  # nothing comes before the first token that could predict it
    return Document(np.array(ids, dtype=np.int32), mask, divisible)
