"""Where the records of preferences, judged completions and prompts come from, and what they hold.

A text is a string, or a list of messages, which the chat template formats, with the line's "tools"
and "chat_template_kwargs". One line is one of

    {"prompt", "chosen", "rejected"}    a pair
    {"chosen", "rejected"}              a pair of conversations, whose beginning is the prompt; a
                                        prompt that is a string beside them is not read
    {"prompt", "completion", "label"}   a completion that is desirable (true) or not
    {"prompt", ...}                     a prompt; a reward function is given the other keys

Any file may also be a table or a data set of the hub, which the library `datasets` reads. That is
handed to `finetune`, because this package does not need it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ligermodels.converters.checkpoint_files import copied_files
from ligermodels.errors import DataError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import (
    RECORD_SUFFIXES,
    Document,
    Encoder,
    Text,
    all_documents,
    check_files,
    check_targets,
    checked_text,
    completed,
    read_records,
)
from ligermodels.training.files import file_hash, fingerprint
from ligermodels.training.packing import Group

# OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT; a split may be train[:1000].
_DATASET = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))??(?::([\w.-]+(?:\[[^\]]*\])?))?")
_TABLES = (".parquet", ".csv")


class DataLibrary(Protocol):
    """What the library `datasets` does for a run: `ligermodels.integrations.hub_data`."""

    def jsonl_of(self, name: str, config: str | None, split: str, *, progress: bool) -> Path:
        """Return a JSONL file with the rows of a data set of the hub."""

    def jsonl_of_table(self, file: Path, *, progress: bool) -> Path:
        """Return a JSONL file with the rows of a .parquet or .csv file."""

    def stored_documents(
        self, documents: Callable[[], Iterator[Document]], key: str, *, progress: bool
    ) -> Sequence[Document]:
        """Return documents whose tokens lie on the disk."""


Library = Callable[[], DataLibrary]  # imports it when it is needed


def is_dataset(name: str) -> bool:
    """Return whether a name is that of a data set of the hub: there is no such file."""
    return not os.path.lexists(name) and _dataset(name) is not None


def _dataset(name: str) -> tuple[str, str | None, str] | None:
    match = _DATASET.fullmatch(name)
    if match is None or Path(match[1]).suffix:  # that of a mistyped file
        return None
    return match[1], match[2], match[3] or "train"


def local_files(
    names: Sequence[str], library: Library | None = None, *, progress: bool = True
) -> list[Path]:
    """Return the files with the data: those of these names, or copies of data sets and tables.

    Args: library: imports what reads data sets and tables; progress: whether it may show bars.
    Raises:
        DataError: a file is missing or not supported, a data set cannot be loaded, or the library
            `datasets` is needed and not installed.
    """
    found: list[str | Path] = []
    for name in names:
        if is_dataset(name):
            dataset = _dataset(name)
            assert dataset is not None
            found.append(opened(library, name).jsonl_of(*dataset, progress=progress))
        elif Path(name).suffix.lower() in _TABLES and os.path.isfile(name):
            found.append(opened(library, name).jsonl_of_table(Path(name), progress=progress))
        else:
            found.append(name)
    return check_files(found)


def stored_documents(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    source: Path,
    library: Library | None,
    separator: str | None,
    *,
    progress: bool = True,
) -> Sequence[Document]:
    """Return the documents of files as `read_documents` does, with the tokens on the disk.

    They are made once for the same files, tokenizer and code. Only one line of a file of JSON lines
    is in memory then, or only one document of a text.

    Args: source: the folder of the tokenizer.
    Raises:
        DataError: a file cannot be read, a line is wrong, or no document has a target.
    """
    code = sorted((Path(__file__).parent.parent / "text").glob("*.py"))
    facts = {
        "files": [(file_hash(file), file.suffix.lower()) for file in check_files(files)],
        "separator": separator,
        "tokenizer": [file_hash(source / name) for name in copied_files(source)],
        # Other versions of this code, or of the libraries it uses, may make other tokens.
        "code": [file_hash(file) for file in (Path(__file__).parent / "data.py", *code)],
        "versions": [version(name) for name in ("jinja2", "sentencepiece", "tokenizers")],
    }
    found = opened(library, "stream").stored_documents(
        lambda: all_documents(files, tokenizer, separator), fingerprint(facts), progress=progress
    )
    check_targets(found, files)
    return found


def opened(library: Library | None, what: str) -> DataLibrary:
    """Return the library that reads data sets, or raise DataError that names what needs it."""
    if library is None:
        raise DataError(
            f"{what}: this needs the library datasets; in Python, give finetune a data_library "
            "that imports ligermodels.integrations.hub_data"
        )
    try:
        return library()
    except ImportError as error:
        raise DataError(
            f"{what}: this needs the library datasets, but {error.name} is not installed: "
            "pip install 'ligermodels[data]'; or give text or .jsonl files"
        ) from None


def read_pairs(paths: Sequence[str | Path], tokenizer: Tokenizer) -> list[Group]:
    """Return groups of a chosen and a rejected completion, in file order.

    Raises:
        DataError: a file or a line is wrong; the message names them.
    """
    return _read(paths, tokenizer, lambda record, where, encoder: [_pair(record, where, encoder)])


def read_judged(paths: Sequence[str | Path], tokenizer: Tokenizer) -> list[Group]:
    """Return groups of a completion, and another example's completion after the same prompt.

    A pair gives two groups. The other example is the next one with another prompt, if there is one.
    KTO estimates its KL from the second document of each group.

    Raises:
        DataError: a file or a line is wrong, or there is only one example.
    """
    groups = _read(paths, tokenizer, _judged)
    if len(groups) < 2:
        raise DataError("KTO needs at least two examples, because each is compared with another")
    return [
        Group((*a.documents, _mixed(a.documents[0], groups[i].documents[0])), a.label, a.record)
        for a, i in zip(groups, _others(groups))
    ]


def read_prompts(paths: Sequence[str | Path], tokenizer: Tokenizer) -> list[Group]:
    """Return groups of a prompt alone, whose record holds the line.

    Raises:
        DataError: a file or a line is wrong.
    """
    return _read(paths, tokenizer, _prompt)


def _read(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    convert: Callable[[dict[str, Any], str, Encoder], list[Group]],
) -> list[Group]:
    encoder = Encoder(tokenizer)
    groups: list[Group] = []
    for file in check_files(paths):
        if file.suffix.lower() not in RECORD_SUFFIXES:
            raise DataError(f"{file}: this loss needs .jsonl files, with one object per line")
        for record, where in read_records(file):
            groups += convert(record, where, encoder)
    if not groups:
        raise DataError(f"{', '.join(map(str, paths))}: there is nothing to train on")
    return groups


def _pair(record: dict[str, Any], where: str, encoder: Encoder) -> Group:
    chosen, rejected = (checked_text(record, key, where) for key in ("chosen", "rejected"))
    if "prompt" in record:
        prompt = checked_text(record, "prompt", where)
    if "prompt" not in record or (isinstance(prompt, str) and isinstance(chosen, list)):
        prompt, chosen, rejected = _split(chosen, rejected, where)
    return Group(
        tuple(completed(prompt, each, where, encoder, record) for each in (chosen, rejected)),
        record=record,
    )


def _judged(record: dict[str, Any], where: str, encoder: Encoder) -> list[Group]:
    if "chosen" in record:
        pair = _pair(record, where, encoder)
        return [Group((document,), i == 0, record) for i, document in enumerate(pair.documents)]
    prompt, completion = (checked_text(record, key, where) for key in ("prompt", "completion"))
    label = record.get("label")
    if not isinstance(label, bool):
        raise DataError(f'{where}: "label" must be true or false')
    return [Group((completed(prompt, completion, where, encoder, record),), label, record)]


def _prompt(record: dict[str, Any], where: str, encoder: Encoder) -> list[Group]:
    prompt = checked_text(record, "prompt", where)
    found = encoder.prompt(prompt, where, record)
    if not len(found):
        raise DataError(f"{where}: the prompt is empty")
    return [Group((found,), record=record)]


def _split(chosen: Text, rejected: Text, where: str) -> tuple[Text, Text, Text]:
    """Return the common beginning of two conversations, and what is left of each."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise DataError(f'{where}: "prompt" is missing')
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    # The last message of each is an answer, even if both are the same.
    same = min(same, len(chosen) - 1, len(rejected) - 1)
    if same == 0:
        raise DataError(
            f'{where}: "chosen" and "rejected" have no common beginning, so there is no prompt'
        )
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
    mine, theirs = document.loss_mask, other.loss_mask
    ids = np.concatenate([document.ids[~mine], other.ids[theirs]])
    mask = np.concatenate([np.zeros((~mine).sum(), bool), np.ones(theirs.sum(), bool)])
    mask[:1] = False
    return Document(ids, mask, divisible=False)
