"""The perplexity of a model on files, and its answers to the prompts of files."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import ConfigError, DataError, LigerError, counted
from ligermodels.generation.many import generate_many
from ligermodels.models.base import DecoderModel
from ligermodels.progress import track
from ligermodels.text.streaming import text_after
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import Group, read_documents
from ligermodels.training.packing import PackedRows
from ligermodels.training.run_dir import writing
from ligermodels.training.trainer import needs_positions, perplexity

KEY = "generated"  # of the answers, in the records of the prompts


@dataclass(frozen=True)
class FileLoss:
    """The loss on a file, summed over its targets, in nats; `tokens` also counts what is no target.

    `truncated` counts the examples with a prompt that did not fit into a row: the targets beyond it
    are not predicted. `untargeted` counts the documents that had nothing to predict.
    """

    total_loss: float
    targets: int
    tokens: int
    seconds: float
    truncated: int = 0
    untargeted: int = 0

    @property
    def loss(self) -> float:
        """The loss per target."""
        return self.total_loss / self.targets

    def to_dict(self) -> dict[str, float]:
        """Return the numbers by name, with the perplexity and the tokens of a second."""
        names = "loss", "targets", "tokens", "truncated", "untargeted"
        found = {"perplexity": perplexity(self.loss)} | {x: getattr(self, x) for x in names}
        return found | {"tokens_per_second": self.tokens / max(self.seconds, 1e-9)}

    def __add__(self, other: FileLoss) -> FileLoss:
        return FileLoss(*map(sum, zip(astuple(self), astuple(other))))


@torch.no_grad()
def file_loss(
    model: DecoderModel,
    tokenizer: Tokenizer,
    files: Sequence[str | Path],
    *,
    seq_len: int = 1024,
    batch_size: int = 4,
    separator: str | None = None,
    progress: bool = False,
) -> FileLoss:
    """Return the loss of the next token on files, in the formats that training reads.

    The targets are those of training: all tokens of a text, and the answers of examples. Texts that
    are longer than a row are cut, and every target is predicted once. Examples with a prompt lose
    their end instead.

    Args: seq_len: tokens of a row; batch_size: rows of a forward pass; separator: as in
        `read_documents`; progress: whether a bar goes to stderr.
    Raises:
        DataError: a file is missing, or holds nothing to predict.
        ConfigError: the tokenizer makes tokens that the model does not have.
        LigerError: the loss is not finite.
    """
    documents = read_documents(files, tokenizer, separator=separator)
    try:
        rows = PackedRows([documents], seq_len)
    except DataError as error:
        raise DataError(f"{', '.join(map(str, files))}: {error}") from None
    if rows.max_id >= model.config.vocab_size:
        raise ConfigError(
            f"vocab_size: the tokenizer makes token {rows.max_id}, but the model has only "
            f"{model.config.vocab_size} tokens"
        )
    device = model.embed_tokens.weight.device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    started = time.perf_counter()
    starts = range(0, len(rows), batch_size)
    tells = rows.is_packed or needs_positions(model)
    for at in track(starts, "evaluating", len(starts), shows=progress):
        batch = rows.batch(range(at, min(len(rows), at + batch_size)))
        out = model(
            batch.input_ids.to(device),
            labels=batch.labels.to(device),
            position_ids=batch.position_ids.to(device) if tells else None,
            reduction="sum",  # without what layers add, such as the balance of experts
        )
        total += out.loss.double()
    model.train(was_training)
    if not math.isfinite(total):
        raise LigerError(
            f"{', '.join(map(str, files))}: the loss is {float(total)}: the model's logits are not "
            "finite here; try another dtype"
        )
    seconds = time.perf_counter() - started
    counts = rows.num_targets, rows.num_tokens, seconds, rows.num_truncated, rows.num_untargeted
    return FileLoss(float(total), *counts)


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

    The number goes to stderr, if it is not 0.

    Args: output: a file, which may be missing.
    Raises:
        LigerError: a line is not the answer to the prompt that has its place.
    """
    content = output.read_bytes() if output.exists() else b""
    *whole, part = content.split(b"\n")
    for number, line in enumerate([*whole, part] if part else whole):
        begin = _begin(groups[number]) if number < len(groups) else b""
        if number == len(whole):
            begin = begin[: len(part)]
        if not begin or not line.startswith(begin):
            raise LigerError(
                f"{output}:{number + 1}: this line is not an answer to prompt {number + 1}; give "
                "another file for the answers, or remove this one"
            )
    if part:
        os.truncate(output, len(content) - len(part))
    if whole:
        many = counted(len(groups), "prompt")
        print(f"{output}: {len(whole):,} of {many} answered", file=sys.stderr)
    return len(whole)


def write_answers(
    output: Path, groups: Iterable[Group], found: Iterable[Answer]
) -> Iterator[Answer]:
    """Append a line to a file for each prompt, its record and its texts; yield the answers."""
    for group, answer in zip(groups, found):
        texts: Any = answer.texts[0] if len(answer.texts) == 1 else answer.texts
        line = json.dumps(texts, ensure_ascii=False)
        with writing(output), open(output, "ab") as file:
            file.write(_begin(group) + line.encode(errors="replace") + b"}\n")
        yield answer


def _begin(group: Group) -> bytes:
    """Return the line of an answer up to its text."""
    record = {name: value for name, value in group.record.items() if name != KEY}
    return f'{json.dumps(record, ensure_ascii=False)[:-1]}, "{KEY}": '.encode(errors="replace")
