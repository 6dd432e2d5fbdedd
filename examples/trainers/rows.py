"""What the examples in this folder share: rows of tokens, and the number of their targets."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels import Tokenizer

Rows = list[dict[str, Tensor]]


def read_rows(model: str, file: Path, seq: int = 256) -> Rows:
    """Return a text as rows of `seq` tokens, which are their own labels."""
    ids = Tokenizer.from_hf(model).encode(file.read_text(encoding="utf-8"))
    whole = len(ids) // seq
    return [
        {"input_ids": row, "labels": row} for row in torch.tensor(ids[: whole * seq]).split(seq)
    ]


def num_targets(batch: dict[str, Any]) -> int:
    """Return how many labels of a batch are predicted: not the first of each row, and not -100."""
    return int((batch["labels"][:, 1:] != -100).sum())


def mean_over_processes(value: Tensor | int) -> float:
    """Return the mean of a number over the processes, if there are several.

    Gradients are averaged over the processes. With their mean number of targets as the normalizer,
    the average is the gradient of one process that sees all rows. The result is no tensor, because
    FSDP2 would round one to 16 bit where it computes in 16 bit.
    """
    number = value.item() if isinstance(value, Tensor) else value
    if not dist.is_initialized():
        return float(number)
    numbers = [0.0] * dist.get_world_size()
    dist.all_gather_object(numbers, float(number))
    return sum(numbers) / len(numbers)
