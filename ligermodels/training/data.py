"""Training data: turn text and JSONL files into documents of token ids with a loss mask.

Records of other tools, ShareGPT and Alpaca, become records with messages, or prompt and completion:

    {"conversations": [{"from", "value"}, ...], "system"?}
    {"instruction", "output", "input"?, "system"?, "history"?: [[ask, answer], ...]}

`packing` packs the documents into rows. Both modules depend only on the files, the tokenizer and a
seed. A run that was killed therefore finds the same rows in the same order when it resumes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from ligermodels.converters.files import open_regular, unique_keys
from ligermodels.errors import DataError, first_line, short_repr
from ligermodels.text.tokenizer import Tokenizer

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
REFUSED_SUFFIXES = (".parquet", ".arrow", ".csv", ".gz", ".zst", ".zip")

Text = Any  # a string, or a list of messages
# What chat_template_kwargs may not hold: arguments of `Tokenizer.apply_chat_template` that come
# from the rest of the record, or from the run.
# Another template than the model's would mark other turns, or none, as targets.
_SET_ELSEWHERE = "self messages add_generation_prompt tokenize tools chat_template".split()


ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
}
# The prompt that Stanford Alpaca was trained with, for a model without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_CONTEXT = ", paired with an input that provides further context"


@dataclass(frozen=True)
class Document:
    """One document: `ids` (n,) int32, and `loss_mask` (n,) bool, True if the id is a target.

    `divisible` says whether the document may be cut into pieces. Plain text may be cut anywhere. An
    example with a prompt may not, because its second piece would be an answer without a question.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    divisible: bool = True

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """The number of ids that are targets of the loss. The first one never is."""
        return int(self.loss_mask[1:].sum())

    def part(self, start: int, stop: int) -> Document:
        """Return the ids from `start` to `stop`, whose first one is no target."""
        loss_mask = self.loss_mask[start:stop]
        if loss_mask[:1].any():
            loss_mask = loss_mask.copy()
            loss_mask[0] = False
        return Document(self.ids[start:stop], loss_mask, self.divisible)


def check_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths as `Path`, or raise DataError if one is missing or not supported.

    This is separate from reading, so that a mistyped name is found before a model is downloaded.
    """
    files = [Path(path) for path in paths]
    for file in files:
        open_regular(file, DataError).close()
        if file.suffix.lower() in REFUSED_SUFFIXES:
            raise DataError(
                f"{file}: {file.suffix} files are not supported; give plain text, or .jsonl "
                "with one object per line"
            )
    return files


def read_documents(
    paths: Sequence[str | Path], tokenizer: Tokenizer, *, separator: str | None = None
) -> list[Document]:
    """Tokenize files into documents, in file order.

    A file named .jsonl or .ndjson holds one object per line, and one named .json a list of objects.
    An object has `text`, or `prompt` and `completion`, or `messages` (a list of role and content,
    which the chat template formats), or is a record that `formats` knows. Prompt and completion are
    strings, or lists of messages. Any other file is UTF-8 text. It is one document, or several if
    lines that equal `separator` separate them ("" splits at blank lines).

    Every document except a conversation ends with the tokenizer's end-of-text token. The targets
    are all tokens of a text except the first, a completion with its end, and the assistant's turns
    of a conversation. A document may have none; `PackedRows` leaves it out and counts it.

    Raises DataError, which names file and line.
    """
    files = check_files(paths)
    documents = list(all_documents(files, tokenizer, separator))
    check_targets(documents, files)
    return documents


def check_targets(documents: Iterable[Document], files: Sequence[Path]) -> None:
    """Raise DataError unless a document has a target."""
    if not any(document.num_targets for document in documents):
        names = ", ".join(str(file) for file in files)
        raise DataError(f"{names}: there is no text, or no document has a target")


def all_documents(
    files: Sequence[Path], tokenizer: Tokenizer, separator: str | None
) -> Iterator[Document]:
    """Yield the documents of files, as `read_documents`. There may be none with a target.

    Only one line of a file of JSON lines is in memory, or only one document of a text.
    """
    encoder = Encoder(tokenizer)
    for file in files:
        if file.suffix.lower() in RECORD_SUFFIXES:
            yield from (_record_document(*each, encoder) for each in read_records(file))
        else:
            yield from (encoder.text(each) for each in split_text(_text_lines(file), separator))


def split_text(lines: Iterable[str], separator: str | None) -> Iterator[str]:
    """Yield the documents between lines that equal `separator`, without the empty ones."""
    part: list[str] = []
    for line in chain(lines, [None]):
        if line is None or (separator is not None and line.strip() == separator.strip()):
            document = "\n".join(part).strip("\n")
            if document.strip():
                yield document
            part = []
        else:
            part.append(line)


def _text_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text without their ends."""
    for number, line in enumerate(_lines(file), start=1):
        if "\0" in line:
            raise DataError(f"{file}:{number}: the line holds NUL characters, so it is not text")
        yield line.removesuffix("\n") if not line.endswith("\r\n") else line[:-2]


def read_records(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each object of a file of JSON lines or of one JSON list, and its place for messages.

    Raises:
        DataError: the file cannot be read, is not JSON, or holds something else than objects.
    """
    for record, where in _values(file):
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object, found {_kind(record)}")
        yield record, where


def _values(file: Path) -> Iterator[tuple[Any, str]]:
    if file.suffix.lower() == ".json":
        text = "".join(_lines(file))
        if text.lstrip().startswith("["):
            for number, record in enumerate(_json(text, str(file)), start=1):
                yield record, f"{file}: object {number}"
            return
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            where = f"{file}:{number}"
            yield _json(line.rstrip("\r\n"), where), where


def _lines(file: Path) -> Iterator[str]:
    number = 1
    try:
        with open_regular(file, DataError) as opened:
            for number, line in enumerate(io.BufferedReader(opened), start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"{file}: the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{file}:{number}: the line is not UTF-8 text") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys(where, DataError))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
        raise DataError(f"{where}: this is not JSON: {first_line(error)}") from None


def _record_document(record: dict[str, Any], where: str, encoder: Encoder) -> Document:
    whole, record = record, normalised(record, where, has_template=encoder.has_template)
    # In a table every record has every key.
    kinds = [kind for kind in ("text", "prompt", "messages") if record.get(kind) is not None]
    if kinds == ["prompt", "messages"] and record.get("completion") is None:
        kinds = ["messages"]  # Some data sets also have the first message as a prompt.
    if len(kinds) != 1:
        found = [f"{key!r} (null)" if value is None else repr(key) for key, value in record.items()]
        raise DataError(
            f'{where}: expected one of the keys "text", "prompt" (with "completion"), '
            '"messages", "conversations" (ShareGPT) or "instruction" (with "output", Alpaca); '
            f"found {', '.join(found) or 'no keys'}"
        )
    if kinds == ["messages"]:
        messages = _with_answers(checked_messages(record["messages"], where), where)
        return encoder.chat(messages, where, template_variables(whole, where))
    if kinds == ["text"]:
        text = checked_string(record, "text", where)
        return encoder.text(text if text.strip() else "")
    prompt, completion = (checked_text(record, key, where) for key in ("prompt", "completion"))
    return completed(prompt, completion, where, encoder, record)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def checked_string(record: dict[str, Any], key: str, where: str) -> str:
    """Return a text of a record, or raise DataError."""
    if key not in record:
        raise DataError(f'{where}: "{key}" is missing')
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f'{where}: "{key}" must be a string, found {_kind(value)}')
    _check_unicode(value, f'"{key}"', where)
    return value


def _check_unicode(text: str, what: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: {what} holds half a surrogate pair, so it is not valid Unicode"
        ) from None


def checked_messages(messages: Any, where: str, key: str = "messages") -> list[dict[str, Any]]:
    """Return a list of messages, or raise DataError."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: "{key}" must be a list with at least one message')
    for message in messages:
        if not isinstance(message, dict):
            raise DataError(f"{where}: a message must be an object, found {_kind(message)}")
        checked_string(message, "role", where)
        if not message.get("tool_calls") or message.get("content") is not None:
            checked_string(message, "content", where)
    return messages


def template_variables(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return what a record gives the chat template beside its messages, named as in TRL.

    These are the keys "tools", a list or its JSON text, and "chat_template_kwargs".

    Raises:
        DataError: one of them has the wrong type, or sets what is set elsewhere.
    """
    tools, more = record.get("tools") or None, record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        tools = _json(tools, f'{where}: "tools"') or None
    if tools is not None and (
        not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)
    ):
        raise DataError(f'{where}: "tools" must be a list of objects, or its JSON text')
    if not isinstance(more, dict):
        raise DataError(f'{where}: "chat_template_kwargs" must be an object, found {_kind(more)}')
    if odd := next((name for name in _SET_ELSEWHERE if name in more), None):
        raise DataError(
            f'{where}: "chat_template_kwargs" must not have {odd!r}; remove it, or write tools as '
            'the key "tools" of the record'
        )
    return more if tools is None else {"tools": tools, **more}


def checked_text(record: dict[str, Any], key: str, where: str) -> Text:
    """Return a string or a list of messages of a record, or raise DataError."""
    if not isinstance(record.get(key), list):
        return checked_string(record, key, where)
    return checked_messages(record[key], where, key)


def completed(
    prompt: Text, completion: Text, where: str, encoder: Encoder, record: dict[str, Any]
) -> Document:
    """Encode a prompt and its completion, both strings or both messages, or raise DataError.

    Args: record: the record that holds both. The chat template may read its other fields.
    """
    if isinstance(prompt, list) != isinstance(completion, list):
        raise DataError(
            f"{where}: one of prompt and completion is a string, the other a list of messages; "
            "write both as one of the two"
        )
    if isinstance(prompt, list):
        turns = [(len(prompt), len(prompt) + len(completion))]
        variables = template_variables(record, where)
        return encoder.chat([*prompt, *completion], where, variables, turns)
    return encoder.completion(prompt, completion)


def _with_answers(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        named = ", ".join(map(short_repr, roles[:4]))
        raise DataError(
            f'{where}: "messages" has no turn of the assistant, so there is nothing to learn; its '
            f'roles are {named}; name the turns of the model "assistant", the others "user" or '
            '"system"'
        )
    if roles[0] == "assistant":
        raise DataError(
            f'{where}: "messages" begins with a turn of the assistant; put the turn that this one '
            "answers before it, or remove it"
        )
    return messages


class Encoder:
    """Encode texts, completions and conversations as documents, with the special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.has_template = getattr(tokenizer, "chat_template", None) is not None
        bare = tokenizer.encode("a", add_special_tokens=False)
        full = tokenizer.encode("a", add_special_tokens=True)
        # `prefix` is what the tokenizer adds before a text, usually one begin token or nothing.
        # `end` replaces what it adds after a text, so that no end token follows a prompt.
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        self.prefix = full[:start]
        self.end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def text(self, text: str) -> Document:
        """Encode a text, all of whose tokens are targets."""
        ids = self.prefix + self._encode(text) + self.end if text else []
        return self._document(ids, [True] * len(ids), divisible=True)

    def completion(self, prompt: str, completion: str) -> Document:
        """Encode a prompt and its completion, which is the target with its end token."""
        ids, loss_mask = self._segments([(prompt, False), (completion, True)])
        ids = self.prefix + ids + self.end
        loss_mask = [False] * len(self.prefix) + loss_mask + [True] * len(self.end)
        return self._document(ids, loss_mask, divisible=False)

    def chat(
        self,
        messages: list[dict[str, Any]],
        where: str,
        variables: dict[str, Any],
        turns: Sequence[tuple[int, int]] | None = None,
    ) -> Document:
        """Encode a conversation with the chat template; the assistant's turns are the targets.

        A turn of the assistant begins where the template's generation prompt ends, because the
        model starts to generate there. It ends where the template ends the turn.

        Args: where: the place that errors name; variables: further variables for the template;
            turns: the first message of each turn and that after its last, if they are known.
        """
        if turns is None:
            roles = [message["role"] for message in messages]
            turns = [(i, i + 1) for i, role in enumerate(roles) if role == "assistant"]
        whole = self._render(messages, False, where, variables)
        segments: list[tuple[str, bool]] = []
        done = 0
        for start, stop in turns:
            before = self._render(messages[:start], True, where, variables)
            through = self._render(messages[:stop], False, where, variables)
            if not (whole.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"{where}: the chat template renders message {start + 1} differently inside "
                    "the conversation than at its end, so the tokens of this message cannot be "
                    "found; split the conversation so that this message is the last"
                )
            segments += [
                (whole[done : len(before)], False),
                (whole[len(before) : len(through)], True),
            ]
            done = len(through)
        segments.append((whole[done:], False))
        ids, loss_mask = self._segments([segment for segment in segments if segment[0]])
        return self._document(ids, loss_mask, divisible=False)

    def prompt(self, prompt: Text, where: str, record: dict[str, Any]) -> Document:
        """Encode the prompt of a record, up to where the model begins; it has no targets."""
        if isinstance(prompt, str):
            ids = self.prefix + self._encode(prompt)
        else:
            variables = template_variables(record, where)
            ids = self._encode(self._render(prompt, True, where, variables))
        return self._document(ids, [False] * len(ids), divisible=False)

    def _render(
        self,
        messages: list[dict[str, Any]],
        generation: bool,
        where: str,
        variables: dict[str, Any],
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=generation, tokenize=False, **variables
            )
        # The template is a program from the checkpoint, so it may raise any exception.
        except Exception as error:
            raise DataError(f"{where}: the chat template fails: {first_line(error)}") from error
        _check_unicode(text, "the rendered conversation", where)
        return text

    def _segments(self, segments: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Return the tokens of the joined segments, and for each token whether it is a target.

        The joined text is encoded at once if every segment boundary is also a token boundary, which
        is nearly always so. Otherwise each segment is encoded by itself. This matches generation,
        where the prompt is encoded without its answer.
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

    @staticmethod
    def _document(ids: list[int], loss_mask: list[bool], divisible: bool) -> Document:
        mask = np.array(loss_mask, dtype=np.bool_)
        mask[:1] = False  # no token before the first one could predict it
        return Document(np.array(ids, dtype=np.int32), mask, divisible)


def normalised(record: dict[str, Any], where: str, *, has_template: bool) -> dict[str, Any]:
    """Return a ShareGPT or Alpaca record with `messages`, or `prompt` and `completion`.

    Other records are returned as they are.

    Args: where: the record's place for messages; has_template: whether the tokenizer has a chat
        template. Without one, an Alpaca record has the prompt that Alpaca was trained with.
    Raises:
        DataError: a part is missing, or has the wrong type.
    """
    if "conversations" in record and "messages" not in record:
        return {"messages": _with_system(record, where) + _sharegpt(record, where)}
    if "instruction" in record and "output" in record:
        return _alpaca(record, where, has_template)
    return record


def _sharegpt(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f'{where}: "conversations" must be a list of objects')
    messages = []
    for turn in turns:
        # Some data sets have ShareGPT's list and the keys of OpenAI's messages.
        sender, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(sender, str) or sender not in ROLES:
            raise DataError(
                f'{where}: "from": {short_repr(sender)} is not known; expected one of '
                + ", ".join(ROLES)
            )
        messages.append({"role": ROLES[sender], "content": value})
    return messages


def _alpaca(record: dict[str, Any], where: str, has_template: bool) -> dict[str, Any]:
    instruction, given = record["instruction"], record.get("input") or ""
    if not isinstance(instruction, str) or not isinstance(given, str):
        raise DataError(f'{where}: "instruction" and "input" must be strings')
    if has_template:
        asked = f"{instruction}\n\n{given}" if given else instruction
        pairs = [*_history(record, where), (asked, record["output"])]
        messages = _with_system(record, where)
        for ask, answer in pairs:
            messages.append({"role": "user", "content": ask})
            messages.append({"role": "assistant", "content": answer})
        return {"messages": messages}
    if odd := next((key for key in ("system", "history") if record.get(key)), None):
        raise DataError(f'{where}: "{odd}" needs a chat template, and this model has none')
    prompt = _ALPACA.format(
        context=_CONTEXT if given else "",
        instruction=instruction,
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": record["output"]}


def _history(record: dict[str, Any], where: str) -> list[Any]:
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise DataError(f'{where}: "history" must be a list of pairs, [question, answer]')
    return history


def _with_system(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    system = record.get("system") or ""
    if not isinstance(system, str):
        raise DataError(f'{where}: "system" must be a string')
    return [{"role": "system", "content": system}] if system else []
