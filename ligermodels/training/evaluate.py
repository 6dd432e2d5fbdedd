"""The perplexity of a model on files, and how many of their questions it answers as they do."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from ligermodels.errors import ConfigError, LigerError
from ligermodels.models.base import DecoderModel
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.answers import KEY, answers
from ligermodels.training.data import read_documents, read_questions
from ligermodels.training.packing import PackedRows
from ligermodels.training.trainer import perplexity

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


@dataclass(frozen=True)
class FileLoss:
    """The loss on a file, per target, in nats; `tokens` also counts what is no target.

    `truncated` counts the examples with a prompt that did not fit into a row: the targets beyond it
    are not predicted. `untargeted` counts the documents that had nothing to predict.
    """

    loss: float
    targets: int
    tokens: int
    seconds: float
    truncated: int = 0
    untargeted: int = 0

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)

    def to_dict(self) -> dict[str, float]:
        """Return all numbers by name, with the tokens of a second instead of the seconds."""
        found = {"perplexity": self.perplexity, **vars(self)}
        found["tokens_per_second"] = self.tokens / max(found.pop("seconds"), 1e-9)
        return found

    def __add__(self, other: FileLoss) -> FileLoss:
        targets = self.targets + other.targets
        loss = (self.loss * self.targets + other.loss * other.targets) / targets
        seconds = self.seconds + other.seconds
        truncated = self.truncated + other.truncated
        untargeted = self.untargeted + other.untargeted
        return FileLoss(loss, targets, self.tokens + other.tokens, seconds, truncated, untargeted)


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
    rows = PackedRows([documents], seq_len)
    if rows.max_id >= model.config.vocab_size:
        raise ConfigError(
            f"vocab_size: the tokenizer makes token {rows.max_id}, but the model has only "
            f"{model.config.vocab_size} tokens"
        )
    device = model.embed_tokens.weight.device
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    targets, started = 0, time.perf_counter()
    for at in tqdm(
        range(0, len(rows), batch_size),
        unit="batch",
        disable=not progress,
        file=sys.stderr,
        dynamic_ncols=True,
    ):
        batch = rows.batch(range(at, min(len(rows), at + batch_size)))
        out = model(
            batch.input_ids.to(device),
            labels=batch.labels.to(device),
            position_ids=batch.position_ids.to(device),
            reduction="sum",  # without what layers add, such as the balance of experts
        )
        total += out.loss.double()
        targets += batch.num_targets
    model.train(was_training)
    loss = float(total) / targets
    if not math.isfinite(loss):
        raise LigerError(
            f"{', '.join(map(str, files))}: the loss is {loss}: the model's logits are not finite "
            "here; try another dtype"
        )
    seconds = time.perf_counter() - started
    counts = rows.num_truncated, rows.num_untargeted
    return FileLoss(loss, targets, rows.num_tokens, seconds, *counts)


def file_matches(
    model: DecoderModel,
    tokenizer: Tokenizer,
    files: Sequence[str | Path],
    *,
    output: IO[str],
    **options: Any,
) -> dict[str, float]:
    """Answer the questions of files, and return how many answers are right, as `is_right`.

    Args:
        files: as in `read_questions`.
        output: gets a line of JSON for each question: its record, what was generated, and whether
            that is right.
        options: those of `answers`.
    Raises: as `read_questions` and `answers`.
    """
    groups = read_questions(files, tokenizer)
    right = 0
    for group, answer in zip(groups, answers(model, tokenizer, groups, **options)):
        matches = is_right(answer.texts[0], group.references)
        right += matches
        line = {**group.record, KEY: answer.texts[0], "right": matches}
        output.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {"exact_match": right / len(groups), "right": right, "questions": len(groups)}


def is_right(text: str, references: Iterable[str | float]) -> bool:
    """Return whether an answer equals one of the references, without the spaces around them.

    For a reference that is a number, the last number in the answer counts.
    """
    numbers = _NUMBER.findall(text)
    for reference in references:
        wanted = str(reference).strip()
        if text.strip() == wanted:
            return True
        if numbers and _NUMBER.fullmatch(wanted) and _value(numbers[-1]) == _value(wanted):
            return True
    return False


def _value(number: str) -> float:
    return float(number.replace(",", ""))
