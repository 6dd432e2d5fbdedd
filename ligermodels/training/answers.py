"""A model's answers to the prompts of a file, in a file that goes on after a kill."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ligermodels.errors import LigerError
from ligermodels.generation.many import generate_many
from ligermodels.models.base import DecoderModel
from ligermodels.text.streaming import text_after
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import Group

KEY = "generated"  # of the answers, in the records of the prompts
SYNC_SECONDS = 1.0  # so much work may be lost with the machine; none is lost with the process


@dataclass(frozen=True)
class Answer:
    """The texts of a prompt's samples, the number of their tokens, and how many were cut short."""

    texts: list[str]
    tokens: int
    cut: int


def answers(
    model: DecoderModel,
    tokenizer: Tokenizer,
    groups: Sequence[Group],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    stop_strings: Sequence[str] = (),
    **options: Any,
) -> Iterator[Answer]:
    """Return an iterator over the answers to prompts, in their order.

    The text of an answer is without special tokens, and ends before one of stop_strings.

    Args:
        groups: as `read_prompts` returns them.
        options: with the other arguments, those of `generate_many`.
    Raises:
        LigerError: what `generate_many` refuses, at the call.
    """
    prompts = [group.documents[0].ids.tolist() for group in groups]
    options |= {"tokenizer": tokenizer, "stop_strings": stop_strings, "num_samples": num_samples}
    try:
        made = generate_many(model, prompts, max_new_tokens, **options)
    except ValueError as error:
        raise LigerError(f"{error}") from error

    def answer(samples: list[Tensor], prompt: list[int]) -> Answer:
        texts = [text_after(tokenizer, prompt, ids.tolist(), stop_strings) for ids in samples]
        lengths = [*map(len, samples)]
        return Answer(texts, sum(lengths), lengths.count(max_new_tokens))

    return (answer(samples, prompt) for *samples, prompt in zip(*[made] * num_samples, prompts))


def count_answered(output: Path, groups: Sequence[Group]) -> int:
    """Return how many of the prompts a file answers, and remove a line that a kill has cut short.

    Raises:
        LigerError: a line is not the answer to the prompt that has its place.
    """
    if not output.exists():
        return 0
    count = size = 0
    with open(output, "r+b") as file:
        for line in file:
            begin = b"" if count == len(groups) else _begin(groups[count])
            is_whole = line.endswith(b"\n")
            if not begin or not line.startswith(begin if is_whole else begin[: len(line)]):
                raise LigerError(
                    f"{output}:{count + 1}: this line is not an answer to prompt {count + 1}; give "
                    "another file for the answers, or remove this one"
                )
            if is_whole:
                count, size = count + 1, size + len(line)
        file.truncate(size)
    return count


def write_answers(
    output: Path, groups: Iterable[Group], found: Iterable[Answer]
) -> Iterator[Answer]:
    """Append a line to a file for each prompt, its record and its texts; yield the answers."""
    synced = time.monotonic()
    with open(output, "ab") as file:
        for group, answer in zip(groups, found):
            texts = answer.texts[0] if len(answer.texts) == 1 else answer.texts
            file.write(_begin(group) + json.dumps(texts, ensure_ascii=False).encode() + b"}\n")
            file.flush()
            if time.monotonic() - synced > SYNC_SECONDS:
                os.fsync(file.fileno())
                synced = time.monotonic()
            yield answer
        os.fsync(file.fileno())


def _begin(group: Group) -> bytes:
    """Return the line of an answer up to its text."""
    record = {name: value for name, value in group.record.items() if name != KEY}
    return f'{json.dumps(record, ensure_ascii=False)[:-1]}, "{KEY}": '.encode(errors="replace")
