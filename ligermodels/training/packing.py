"""Pack documents into the rows of a batch, and choose the order of the rows.

A row holds several documents one after the other. `position_ids` restart at each document, so the
model limits attention to that document. The first token of a document is never a target, so the
loss does not cross a boundary either. The padding at the end of a row counts as one more document,
without targets. Lengths are in tokens.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch

from ligermodels.errors import DataError
from ligermodels.training.data import Document

IGNORE_INDEX = -100
# No result depends on the token that fills the end of a row, and every model has this one. The
# tokenizer's own pad token may be one that the model has no embedding for.
PAD_ID = 0


@dataclass(frozen=True)
class Batch:
    """Packed rows for the model: three (rows, width) int64 tensors, and two counts (int)."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    num_tokens: int
    num_targets: int

    def uncounted(self) -> Self:
        """Return these rows as a batch that counts for nothing."""
        return replace(self, num_tokens=0, num_targets=0)

    def to(self, device: torch.device) -> Self:
        """Return the batch with all its tensors on a device."""
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)
        }
        return replace(self, **moved)

    def in_order(self, order: torch.Tensor) -> Batch:
        """Return the same rows in another order."""
        rows = self.input_ids[order], self.labels[order], self.position_ids[order]
        return Batch(*rows, self.num_tokens, self.num_targets)


def hold_out(
    documents: list[Document], fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split off about `fraction` of the documents for evaluation: (training, held out).

    The documents are chosen at random with `seed`. If there are too few, the end of each plain text
    is held out instead. Raises DataError if nothing can be split off.
    """
    if fraction <= 0:
        return documents, []
    if len(documents) * fraction < 1 and all(document.divisible for document in documents):
        train, held = [], []
        for document in documents:
            end = len(document) - max(2, round(len(document) * fraction))
            if end < 2:
                train.append(document)
                continue
            train.append(Document(document.ids[:end], document.loss_mask[:end]))
            # The two parts share one token, so that each token is still predicted once.
            tail = document.loss_mask[end - 1 :].copy()
            tail[0] = False
            held.append(Document(document.ids[end - 1 :], tail))
    else:
        # Both completions of a pair come from one record, and stay together.
        records = [id(getattr(document, "record", document)) for document in documents]
        every = [*dict.fromkeys(records)]
        count = max(1, round(len(every) * fraction))
        chosen = {every[i] for i in generator(seed, 1).permutation(len(every))[:count]}
        train = [document for document, key in zip(documents, records) if key not in chosen]
        held = [document for document, key in zip(documents, records) if key in chosen]
    if not train or not held:
        raise DataError(
            "the training data is too small to hold out a part of it for evaluation; give "
            "evaluation files (--eval-files), or hold out nothing (--eval-fraction 0)"
        )
    return train, held


def generator(*key: int) -> np.random.Generator:
    """Return a random generator that depends only on the key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def cut(document: Document, seq_len: int) -> list[Document]:
    """Cut a document into pieces of at most `seq_len` tokens that hold at least one target each.

    Neighbouring pieces of a text share one token, so that every target is predicted exactly once.
    An example with a prompt keeps only its beginning.
    """
    if len(document) <= seq_len:
        return [document]
    stop = len(document) - 1 if document.divisible else 1
    pieces = []
    for start in range(0, stop, seq_len - 1):
        loss_mask = document.loss_mask[start : start + seq_len].copy()
        loss_mask[0] = False
        piece = Document(document.ids[start : start + seq_len], loss_mask, document.divisible)
        if piece.num_targets:
            pieces.append(piece)
    return pieces


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group the indices of `lengths` with sums up to `capacity`, by best fit, longest first."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, lengths[i])
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[row].append(i)
        left = room - lengths[i]
        if left not in by_room:
            by_room[left] = []
            bisect.insort(rooms, left)
        by_room[left].append(row)
    return rows


class PackedRows:
    """Documents packed into rows of at most `seq_len` tokens.

    Args:
        documents: the documents to pack; `cut` shortens those that are longer than a row.
        seq_len: tokens per row, at least 2.
        multiple: the width of rows is a multiple of this.

    `width` is the length of the longest row, and all rows are padded to it. With little data it is
    less than `seq_len`. `num_truncated` counts the examples with a prompt that were too long and
    lost their end. `num_dropped` counts those of them that have no target left, and
    `num_untargeted` the documents, of any length, that had no target at all; both are left out.
    """

    def __init__(self, documents: Sequence[Document], seq_len: int, multiple: int = 1) -> None:
        self.pieces: list[Document] = []
        self.num_truncated = self.num_dropped = self.num_untargeted = 0
        for document in documents:
            if not document.num_targets:
                self.num_untargeted += 1
                continue
            pieces = cut(document, seq_len)
            self.pieces += pieces
            if not document.divisible and len(document) > seq_len:
                self.num_truncated += 1
                self.num_dropped += not pieces
        if not self.pieces:
            raise DataError(
                f"no document has a target within the first {seq_len} tokens; use longer rows "
                "(--seq-len)"
            )
        self.rows = best_fit([len(piece) for piece in self.pieces], seq_len)
        longest = max(sum(len(self.pieces[i]) for i in row) for row in self.rows)
        self.width = -(-longest // multiple) * multiple
        self.num_tokens = sum(len(piece) for piece in self.pieces)
        self.num_targets = sum(piece.num_targets for piece in self.pieces)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def max_id(self) -> int:
        """The largest token id in the rows."""
        return max(int(piece.ids.max()) for piece in self.pieces)

    def fingerprint(self) -> str:
        """Return a hash of the tokens and targets of all rows, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(f"row {len(row)}".encode())
            for i in row:
                digest.update(f"doc {len(self.pieces[i])}".encode())
                digest.update(np.ascontiguousarray(self.pieces[i].ids).tobytes())
                digest.update(np.ascontiguousarray(self.pieces[i].loss_mask).tobytes())
        return digest.hexdigest()

    def documents(self, index: int) -> list[Document]:
        """Return the documents of a row."""
        return [self.pieces[i] for i in self.rows[index]]

    def batch(self, indices: Iterable[int]) -> Batch:
        """Return the rows with these indices, on the CPU.

        `labels` are not shifted, and are -100 where a token is no target. `position_ids` restart at
        each document.
        """
        indices = list(indices)
        shape = (len(indices), self.width)
        input_ids = torch.full(shape, PAD_ID)
        labels = torch.full(shape, IGNORE_INDEX)
        position_ids = torch.zeros(shape, dtype=torch.int64)
        num_tokens = num_targets = 0
        for at, index in enumerate(indices):
            end = 0
            for piece in self.documents(index):
                start, end = end, end + len(piece)
                input_ids[at, start:end] = torch.from_numpy(piece.ids)
                targets = np.where(piece.loss_mask, piece.ids, IGNORE_INDEX)
                labels[at, start:end] = torch.from_numpy(targets)
                position_ids[at, start:end] = torch.arange(end - start)
                num_targets += piece.num_targets
            position_ids[at, end:] = torch.arange(self.width - end)
            num_tokens += end
        return Batch(input_ids, labels, position_ids, num_tokens, num_targets)


def row_order(num_rows: int, seed: int, *key: int) -> Callable[[int], int]:
    """Return a function from a running count to a row index; each epoch has its own order.

    The function has no state: the row depends only on `seed`, `key` and the count, so resuming is
    exact.
    """

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return generator(seed, 0, epoch, *key).permutation(num_rows)

    return lambda count: int(permutation(count // num_rows)[count % num_rows])
