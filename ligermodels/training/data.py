"""Training data: turn text and JSONL files into documents of token ids with a loss mask.

Records of other tools, ShareGPT and Alpaca, become records with messages, or prompt and completion:

    {"conversations": [{"from", "value"}, ...], "system"?}
    {"instruction", "output", "input"?, "system"?, "history"?: [[ask, answer], ...]}

Losses that compare whole completions have records of preferences, judged completions and prompts. A
text is then a string, or a list of messages, which the chat template formats:

    {"prompt", "chosen", "rejected"}    a pair
    {"chosen", "rejected"}              a pair of conversations, whose beginning is the prompt; a
                                        prompt that is a string beside them is not read
    {"prompt", "completion", "label"}   a completion that is desirable (true) or not
    {"prompt", ...}                     a prompt; a reward function is given the other keys

Any file may also be a table or a data set of the hub, which the library `datasets` reads.

`packing` packs the documents into rows. Both modules depend only on the files, the tokenizer and a
seed. A run that was killed therefore finds the same rows in the same order when it resumes.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ligermodels.converters.files import open_regular, unique_keys
from ligermodels.errors import DataError, first_line, short_repr
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.run_dir import file_hash, fingerprint

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")

# OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT; a split may be train[:1000].
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))??(?::([\w.-]+(?:\[[^\]]*\])?))?")
_TABLES = (".parquet", ".csv")
_STORED_FORMAT = 2  # of the tokens on the disk; another one where this module makes other tokens

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

_T = TypeVar("_T")
Record = dict[str, Any]
Text = Any  # a string, or a list of messages
# Key of a record, such as "prompt" -> the name that the data have for it.
Columns = Mapping[str, str]


@dataclass(frozen=True)
class Document:
    """One document: `ids` (n,) int32, and `loss_mask` (n,) bool, True if the id is a target.

    The first id is no target, because no token before it could predict it. `divisible` says whether
    the document may be cut into pieces. Plain text may be cut anywhere. An example with a prompt
    may not, because its second piece would be an answer without a question.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    divisible: bool = True

    def __post_init__(self) -> None:
        if self.loss_mask[:1].any():
            mask = self.loss_mask.copy()
            mask[0] = False
            object.__setattr__(self, "loss_mask", mask)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """The number of ids that are targets of the loss."""
        return int(self.loss_mask.sum())

    def part(self, start: int, stop: int) -> Document:
        """Return the ids from `start` to `stop`."""
        return Document(self.ids[start:stop], self.loss_mask[start:stop], self.divisible)


@dataclass(frozen=True)
class Group:
    """Documents that a loss compares, and what else the file says of them.

    Attributes:
        documents: whose `loss_mask` is true at the tokens of the completion.
        label: whether the first completion is a desirable one.
        record: the line of the file.
    """

    documents: tuple[Document, ...]
    label: bool = True
    record: Record = field(default_factory=dict)
    divisible = False

    def __len__(self) -> int:
        return max(map(len, self.documents))


def check_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths as `Path`, or raise DataError if one is missing or a table.

    This is separate from reading, so that a mistyped name is found before a model is downloaded.
    """
    files = [Path(path) for path in paths]
    for file in files:
        open_regular(file, DataError).close()
        if file.suffix.lower() in _TABLES:
            raise DataError(
                f"{file}: this is a table; read it by `local_files`, or make .jsonl of it"
            )
    return files


def read_documents(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    separator: str | None = None,
    columns: Columns | None = None,
) -> list[Document]:
    """Tokenize files into documents, in file order.

    A file named .jsonl or .ndjson holds one object per line, and one named .json a list of objects.
    An object has `text`, or `prompt` and `completion`, or `messages` (a list of role and content,
    which the chat template formats), or is a record that `formats` knows. Prompt and completion are
    strings, or lists of messages. Any other file is UTF-8 text. It is one document, or several if
    lines that equal `separator` separate them ("" splits at blank lines). `columns` has the names
    that the objects have for keys.

    Every document except a conversation ends with the tokenizer's end-of-text token. The targets
    are all tokens of a text except the first, a completion with its end, and the assistant's turns
    of a conversation. A document may have none; `PackedRows` leaves it out and counts it.

    Raises DataError, which names file and line.
    """
    return list(all_documents(check_files(paths), tokenizer, separator, columns))


def all_documents(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    separator: str | None,
    columns: Columns | None = None,
) -> Iterator[Document]:
    """Yield the documents of files, as `read_documents`. There may be none with a target.

    Only one line of a file of JSON lines is in memory, or only one document of a text.

    Raises DataError if the files hold no document.
    """
    encoder, found = Encoder(tokenizer), None
    for file in files:
        documents: Iterable[Document]
        if file.suffix.lower() in RECORD_SUFFIXES:
            documents = _converted(file, encoder.record, columns)
        else:
            lines = (line.rstrip("\r\n") for line in _lines(file))
            documents = map(encoder.text, split_text(lines, separator))
        for found in documents:
            yield found
    if found is None:
        raise DataError(f"{', '.join(map(str, files))}: there is no text")


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


def _converted(
    file: Path, convert: Callable[[Record], _T], columns: Columns | None = None
) -> Iterator[_T]:
    """Yield what `convert` makes of each record of a file; errors name the place of the record.

    Raises:
        DataError: the file cannot be read, is not JSON, or holds something else than objects.
    """
    for place, record in _records(file):
        try:
            if not isinstance(record, dict):
                raise DataError(f"expected an object, found {_kind(record)}")
            found = convert(_renamed(record, columns) if columns else record)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        yield found


def _renamed(record: Record, columns: Columns) -> Record:
    """Return a record with the keys that this library has for them."""
    for name in columns.values():
        if name not in record:
            known = ", ".join(map(short_repr, record))
            raise DataError(f"columns: {short_repr(name)} is missing; the object has {known}")
    rest = {key: value for key, value in record.items() if key not in columns.values()}
    return rest | {key: record[name] for key, name in columns.items()}


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line of JSON, or of each item of a .json list."""
    if file.suffix.lower() == ".json":
        text = "".join(_lines(file))
        if text.lstrip().startswith("["):
            for number, each in enumerate(_parsed(text, str(file)), start=1):
                yield f"{file}: object {number}", each
            return
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield (place := f"{file}:{number}"), _parsed(line.rstrip("\r\n"), place)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys(place, DataError))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
        raise DataError(f"{place}: this is not JSON: {first_line(error)}") from None


def _lines(file: Path) -> Iterator[str]:
    number = 1
    try:
        with open_regular(file, DataError) as opened:
            for number, line in enumerate(io.BufferedReader(opened), start=1):
                if b"\0" in line:  # such as UTF-16
                    raise DataError(
                        f"{file}:{number}: the line holds NUL characters, so it is not UTF-8 text"
                    )
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise DataError(f"{file}: the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{file}:{number}: the line is not UTF-8 text") from None


_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), "a number")


def _checked(record: Record, key: str, kind: type) -> Any:
    """Return the value of a key, or raise DataError if it is missing or of another type."""
    if key not in record:
        raise DataError(f'"{key}" is missing')
    if not isinstance(record[key], kind):
        raise DataError(f'"{key}" must be {_KINDS[kind]}, found {_kind(record[key])}')
    return record[key]


def _checked_text(record: Record, key: str) -> Text:
    """Return a string or a list of messages of a record, or raise DataError."""
    if not isinstance(record.get(key), list):
        return _checked(record, key, str)
    if not record[key]:
        raise DataError(f'"{key}" must be a list with at least one message')
    for message in record[key]:
        if not isinstance(message, dict):
            raise DataError(f"a message must be an object, found {_kind(message)}")
        _checked(message, "role", str)
        if not message.get("tool_calls") or message.get("content") is not None:
            _checked(message, "content", str)
    return record[key]


def _template_variables(record: Record) -> Record:
    """Return what a record gives the chat template beside its messages, named as in TRL.

    These are the keys "tools", a list or its JSON text, and "chat_template_kwargs".
    """
    found = {key: record.get(key) or None for key in ("tools", "chat_template_kwargs")}
    if isinstance(found["tools"], str):
        try:
            found["tools"] = json.loads(found["tools"]) or None
        except ValueError as error:
            raise DataError(f'"tools": this is not JSON: {first_line(error)}') from None
    tools, more = found["tools"], found["chat_template_kwargs"] or {}
    if tools is not None and not all(isinstance(x, dict) for x in _checked(found, "tools", list)):
        raise DataError('"tools" must be a list of objects, or its JSON text')
    if more:
        _checked(found, "chat_template_kwargs", dict)
    return more if tools is None else {"tools": tools, **more}


class Encoder:
    """Encode records, texts and conversations as documents, with the special tokens."""

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

    def record(self, whole: Record) -> Document:
        """Encode a record with a text, a prompt and its completion, or messages."""
        record = normalised(whole, has_template=self.has_template)
        # In a table every record has every key.
        kinds = [kind for kind in ("text", "prompt", "messages") if record.get(kind) is not None]
        if kinds == ["prompt", "messages"] and record.get("completion") is None:
            kinds = ["messages"]  # Some data sets also have the first message as a prompt.
        if len(kinds) != 1:
            found = [f"{k!r} (null)" if v is None else repr(k) for k, v in record.items()]
            raise DataError(
                'expected one of the keys "text", "prompt" (with "completion"), "messages", '
                '"conversations" (ShareGPT) or "instruction" (with "output", Alpaca); '
                f"found {', '.join(found) or 'no keys'}"
            )
        if kinds == ["text"]:
            text = _checked(record, "text", str)
            return self.text(text if text.strip() else "")
        if kinds == ["prompt"]:
            prompt, completion = (_checked_text(record, key) for key in ("prompt", "completion"))
            return self.completed(prompt, completion, record)
        _checked(record, "messages", list)
        messages = _checked_text(record, "messages")
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise DataError(
                '"messages" has no turn of the assistant, so there is nothing to learn; its roles '
                f"are {', '.join(map(short_repr, dict.fromkeys(roles)))}; name the turns of the "
                'model "assistant", the others "user" or "system"'
            )
        if roles[0] == "assistant":
            raise DataError(
                '"messages" begins with a turn of the assistant; put the turn that this one '
                "answers before it, or remove it"
            )
        turns = [(i, i + 1) for i, role in enumerate(roles) if role == "assistant"]
        return self.chat(messages, _template_variables(whole), turns)

    def text(self, text: str) -> Document:
        """Encode a text, all of whose tokens are targets."""
        ids = self.prefix + self._encode(text) + self.end if text else []
        return _document(ids, [True] * len(ids), divisible=True)

    def completed(self, prompt: Text, completion: Text, record: Record) -> Document:
        """Encode a prompt and its completion, both strings or both messages, or raise DataError.

        The completion is the target, with its end.

        Args: record: the record that holds both. The chat template may read its other fields.
        """
        if isinstance(prompt, list) != isinstance(completion, list):
            raise DataError(
                "one of prompt and completion is a string, the other a list of messages; write "
                "both as one of the two"
            )
        if isinstance(prompt, list):
            turns = [(len(prompt), len(prompt) + len(completion))]
            return self.chat([*prompt, *completion], _template_variables(record), turns)
        ids, loss_mask = self._segments([(prompt, False), (completion, True)])
        loss_mask = [False] * len(self.prefix) + loss_mask + [True] * len(self.end)
        return _document(self.prefix + ids + self.end, loss_mask)

    def chat(
        self, messages: list[Record], variables: Record, turns: Sequence[tuple[int, int]]
    ) -> Document:
        """Encode a conversation with the chat template; the assistant's turns are the targets.

        A turn of the assistant begins where the template's generation prompt ends, because the
        model starts to generate there. It ends where the template ends the turn.

        Args: variables: further ones for the template; turns: the first message of each turn and
            that after its last.
        """
        whole = self._render(messages, False, variables)
        segments: list[tuple[str, bool]] = []
        done = 0
        for start, stop in turns:
            before = self._render(messages[:start], True, variables)
            through = self._render(messages[:stop], False, variables)
            if not (whole.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"the chat template renders message {start + 1} differently inside the "
                    "conversation than at its end, so the tokens of this message cannot be found; "
                    "split the conversation so that this message is the last"
                )
            segments.append((whole[done : len(before)], False))
            segments.append((whole[len(before) : len(through)], True))
            done = len(through)
        segments.append((whole[done:], False))
        return _document(*self._segments([segment for segment in segments if segment[0]]))

    def prompt(self, prompt: Text, record: Record) -> Document:
        """Encode the prompt of a record, up to where the model begins; it has no targets."""
        if isinstance(prompt, str):
            ids = self.prefix + self._encode(prompt)
        else:
            ids = self._encode(self._render(prompt, True, _template_variables(record)))
        return _document(ids, [False] * len(ids))

    def _render(self, messages: list[Record], generation: bool, variables: Record) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=generation, tokenize=False, **variables
            )
        # The template is a program from the checkpoint, so it may raise any exception.
        except Exception as error:
            raise DataError(f"the chat template fails: {first_line(error)}") from error

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


def _document(ids: list[int], loss_mask: list[bool], divisible: bool = False) -> Document:
    return Document(np.array(ids, np.int32), np.array(loss_mask, np.bool_), divisible)


def normalised(record: Record, *, has_template: bool) -> Record:
    """Return a ShareGPT or Alpaca record with `messages`, or `prompt` and `completion`.

    Other records are returned as they are.

    Args: has_template: whether the tokenizer has a chat template. Without one, an Alpaca record has
        the prompt that Alpaca was trained with.
    Raises:
        DataError: a part is missing, or has the wrong type.
    """
    if "conversations" in record and "messages" not in record:
        return {"messages": _with_system(record) + _sharegpt(record)}
    if "instruction" in record and "output" in record:
        return _alpaca(record, has_template)
    return record


def _sharegpt(record: Record) -> list[Record]:
    messages = []
    for turn in _checked(record, "conversations", list):
        if not isinstance(turn, dict):
            raise DataError('"conversations" must be a list of objects')
        # Some data sets have ShareGPT's list and the keys of OpenAI's messages.
        sender, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(sender, str) or sender not in ROLES:
            known = ", ".join(ROLES)
            raise DataError(f'"from": {short_repr(sender)} is not known; expected one of {known}')
        messages.append({"role": ROLES[sender], "content": value})
    return messages


def _alpaca(record: Record, has_template: bool) -> Record:
    given = record.get("input") or ""
    instruction = _checked(record, "instruction", str)
    if has_template:
        history = record.get("history") or []
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise DataError('"history" must be a list of pairs, [question, answer]')
        asked = f"{instruction}\n\n{given}" if given else instruction
        messages = _with_system(record)
        for ask, answer in [*history, (asked, record["output"])]:
            messages.append({"role": "user", "content": ask})
            messages.append({"role": "assistant", "content": answer})
        return {"messages": messages}
    if odd := next((key for key in ("system", "history") if record.get(key)), None):
        raise DataError(f'"{odd}" needs a chat template, and this model has none')
    prompt = _ALPACA.format(
        context=_CONTEXT if given else "",
        instruction=instruction,
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return {"prompt": prompt, "completion": record["output"]}


def _with_system(record: Record) -> list[Record]:
    system = record.get("system")
    return [{"role": "system", "content": system}] if system else []


def _dataset(name: str) -> tuple[str, str | None, str] | None:
    """Return the repository, config and split of a data set of the hub; None if it is a file."""
    match = None if os.path.lexists(name) else _DATASET.fullmatch(name)
    if match is None or Path(match[1]).suffix:  # that of a mistyped file
        return None
    return match[1], match[2], match[3] or "train"


def local_files(names: Sequence[str], *, progress: bool = True) -> list[Path]:
    """Return the files with the data: those of these names, or copies of data sets and tables.

    Args: progress: whether the library may show bars.
    Raises:
        DataError: a file is missing or not supported, a data set cannot be loaded, or the library
            `datasets` is needed and not installed.
    """
    found: list[str | Path] = []
    for name in names:
        if dataset := _dataset(name):
            found.append(_hub_data(name).jsonl_of(*dataset, progress=progress))
        elif Path(name).suffix.lower() in _TABLES and os.path.isfile(name):
            found.append(_hub_data(name).jsonl_of_table(Path(name)))
        else:
            found.append(name)
    return check_files(found)


def stored_documents(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    separator: str | None,
    columns: Columns | None = None,
) -> Sequence[Document]:
    """Return the documents of files as `read_documents` does, with the tokens on the disk.

    They are made once for the same files and tokenizer. Only one line of a file of JSON lines
    is in memory then, or only one document of a text.

    Raises:
        DataError: a file cannot be read, or a line is wrong.
    """
    facts = {
        "files": [(file_hash(file), file.suffix.lower()) for file in check_files(files)],
        "separator": separator,
        "columns": columns,
        "tokenizer": {k: sha256(x).hexdigest() for k, x in sorted(tokenizer.files().items())},
        # Other versions of this code, or of the libraries it uses, may make other tokens.
        "format": _STORED_FORMAT,
        "versions": [version(name) for name in ("jinja2", "tokenizers")],
    }
    return _hub_data("stream").stored_documents(
        lambda: all_documents(files, tokenizer, separator, columns), fingerprint(facts)
    )


def _hub_data(what: str) -> Any:
    """Import what reads data sets, or raise DataError that names what needs it."""
    try:
        from ligermodels.integrations import hub_data
    except ImportError as error:
        raise DataError(
            f"{what}: this needs the library datasets, but {error.name} is not installed: "
            "pip install 'ligermodels[data]'; or give text or .jsonl files"
        ) from None
    return hub_data


def read_pairs(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    columns: Columns | None = None,
    *,
    margins: bool = False,
) -> list[Group]:
    """Return groups of a chosen and a rejected completion, in file order.

    Args: margins: whether a "margin" of a record must be a finite number or null.
    Raises:
        DataError: a file or a line is wrong; the message names them.
    """
    return list(_read(paths, tokenizer, partial(_pair, margins=margins), columns))


def read_judged(
    paths: Sequence[str | Path], tokenizer: Tokenizer, columns: Columns | None = None
) -> list[Group]:
    """Return groups of a completion, and another example's completion after the same prompt.

    A pair gives two groups. The other example is the next one with another prompt, if there is one.
    KTO estimates its KL from the second document of each group.

    Raises:
        DataError: a file or a line is wrong, or there is only one example.
    """
    groups = [*chain.from_iterable(_read(paths, tokenizer, _judged, columns))]
    if len(groups) < 2:
        raise DataError("KTO needs at least two examples, because each is compared with another")
    return [
        Group((*a.documents, _mixed(a.documents[0], groups[i].documents[0])), a.label, a.record)
        for a, i in zip(groups, _others(groups))
    ]


def read_prompts(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    chat: list[Record] | None = None,
    columns: Columns | None = None,
) -> list[Group]:
    """Return groups of a prompt alone, whose record holds the line.

    Args: chat: the messages before a prompt that is a text; the chat template then formats them and
        the text as a user's message. By default a text stays as it is.
    Raises:
        DataError: a file or a line is wrong.
    """
    return list(_read(paths, tokenizer, partial(_prompt, chat=chat), columns))


def _read(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    convert: Callable[[Record, Encoder], _T],
    columns: Columns | None = None,
) -> Iterator[_T]:
    """Yield what `convert` makes of each record of files, of which there must be one."""
    encoder, found = Encoder(tokenizer), None
    for file in check_files(paths):
        if file.suffix.lower() not in RECORD_SUFFIXES:
            raise DataError(f"{file}: expected a .jsonl file, with one object per line")
        for found in _converted(file, lambda record: convert(record, encoder), columns):
            yield found
    if found is None:
        raise DataError(f"{', '.join(map(str, paths))}: there is no record")


def _pair(record: Record, encoder: Encoder, margins: bool = False) -> Group:
    margin = record.get("margin") if margins else None
    if margin is not None and not (type(margin) in (int, float) and abs(margin) < 1e30):
        raise DataError(f'"margin" must be a finite number or null, found {short_repr(margin)}')
    prompt = _checked_text(record, "prompt") if "prompt" in record else None
    pair = [_checked_text(record, key) for key in ("chosen", "rejected")]
    if prompt is None or (isinstance(prompt, str) and isinstance(pair[0], list)):
        prompt, *pair = _split(*pair)
    return Group(tuple(encoder.completed(prompt, each, record) for each in pair), record=record)


def _judged(record: Record, encoder: Encoder) -> list[Group]:
    if "chosen" in record:
        pair = _pair(record, encoder)
        return [Group((document,), i == 0, record) for i, document in enumerate(pair.documents)]
    prompt, completion = (_checked_text(record, key) for key in ("prompt", "completion"))
    document = encoder.completed(prompt, completion, record)
    return [Group((document,), _checked(record, "label", bool), record)]


def _prompt(record: Record, encoder: Encoder, chat: list[Record] | None = None) -> Group:
    prompt = _checked_text(record, "prompt")
    if chat is not None and isinstance(prompt, str):
        prompt = [*chat, {"role": "user", "content": prompt}]
    found = encoder.prompt(prompt, record)
    if not len(found):
        raise DataError("the prompt is empty")
    return Group((found,), record=record)


def _split(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Return the common beginning of two conversations, and what is left of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise DataError('"prompt" is missing')
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    # The last message of each is an answer, even if both are the same.
    same = min(same, len(chosen) - 1, len(rejected) - 1)
    if same == 0:
        raise DataError('"chosen" and "rejected" have no common beginning, so there is no prompt')
    return chosen[:same], chosen[same:], rejected[same:]


def _others(groups: list[Group]) -> list[int]:
    """Return for each group the next one, around the end, whose prompt is another one."""
    documents = [group.documents[0] for group in groups]
    prompts = [document.ids[~document.loss_mask].tobytes() for document in documents]
    after = [*range(1, len(groups)), 0]
    if len(set(prompts)) == 1:
        return after
    others = list(after)
    for i in (*reversed(range(len(groups))),) * 2:  # twice, because the search goes around the end
        others[i] = after[i] if prompts[i] != prompts[after[i]] else others[after[i]]
    return others


def _mixed(document: Document, other: Document) -> Document:
    """Return the prompt of a document with the completion of another."""
    ids = np.concatenate([document.ids[~document.loss_mask], other.ids[other.loss_mask]])
    is_new = np.arange(len(ids)) >= (~document.loss_mask).sum()
    return Document(ids, is_new, divisible=False)
