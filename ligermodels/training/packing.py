"""Rows for batches: documents packed into rows, groups of documents, and the order of the rows.

A packed row holds several documents one after the other. `position_ids` restart at each document,
so the model limits attention to that document. The first token of a document is never a target, so
the loss does not cross a boundary either. The padding at the end of a row counts as one more
document, without targets. Losses that compare whole completions have one document in a row, and
groups of rows that belong together. Lengths are in tokens.

Documents are any sequence: a list, or one whose items are read from the disk when they are asked
for. Only the places of the documents are in memory then.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset
from typing_extensions import Self

from ligermodels.errors import DataError
from ligermodels.training.data import Document, Group

IGNORE_INDEX = -100
# No result depends on the token that fills the end of a row, and every model has this one. The
# tokenizer's own pad token may be one that the model has no embedding for.
PAD_ID = 0
_WINDOW = 2**16  # documents that are packed together
_MULTIPLE = 64  # a batch of groups is as long as its longest row, rounded up to a multiple of this


@dataclass(frozen=True)
class Batch:
    """Rows for the model: three (rows, width) int64 tensors, and two counts.

    `is_packed` is whether a row may have several documents, besides the padding at its end. Then
    `cu_seqlens` and `max_seqlen` may tell these, the padding among them, as the model takes them.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    num_tokens: int
    num_targets: int
    is_packed: bool
    cu_seqlens: torch.Tensor | None
    max_seqlen: int

    def uncounted(self) -> Self:
        """Return these rows as a batch that counts for nothing."""
        return replace(self, num_tokens=0, num_targets=0)

    def to(self, device: torch.device) -> Self:
        """Return the batch with all its tensors on a device."""
        moved: dict[str, Any] = {
            name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)
        }
        return replace(self, **moved)

    def chosen(self, rows: slice | torch.Tensor) -> Self:
        """Return some of the rows, or all in another order, with the counts of the whole batch."""
        picked: dict[str, Any] = {
            name: x[rows]
            for name, x in vars(self).items()
            if isinstance(x, torch.Tensor) and x.ndim == 2
        }
        return replace(self, **picked, cu_seqlens=None)


def hold_out(
    items: Sequence[Any], fraction: float, seed: int, number: int = 0, *, alone: bool = True
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split off about `fraction` of the documents or groups: (training, held out).

    They are chosen at random with `seed`. If plain texts are too few, the end of each is held out
    instead. Of too few others one is held out, if they are the only source.

    Args: number: that of the source, if there are several; alone: whether it is the only one.
    """
    count = len(items) * fraction
    if not count:
        return items, []
    if count < 1 and all(item.divisible for item in items):
        train, held = [], []
        for item in items:
            end = len(item) - max(2, round(len(item) * fraction))
            if end < 2:
                train.append(item)
                continue
            train.append(item.part(0, end))
            # The two parts share one token, so that each token is still predicted once.
            held.append(item.part(end - 1, len(item)))
        return train, held
    keys: np.ndarray = np.arange(len(items))
    if isinstance(items[0], Group):  # Both completions of a pair come from one record.
        records = [id(group.record) for group in items]
        places = {record: i for i, record in enumerate(dict.fromkeys(records))}
        keys = np.array([places[record] for record in records])
    total = int(keys[-1]) + 1
    is_held: np.ndarray = np.zeros(total, dtype=np.bool_)
    if count >= 1 or alone:
        chosen = generator(seed, 1, *([number] if number else [])).permutation(total)
        is_held[chosen[: max(1, round(total * fraction))]] = True
    mask = is_held[keys]
    subset: Any = Subset  # its type knows no list
    return subset(items, np.flatnonzero(~mask)), subset(items, np.flatnonzero(mask))


def generator(*key: int) -> np.random.Generator:
    """Return a random generator that depends only on the key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def cut(document: Document, seq_len: int) -> list[tuple[int, int]]:
    """Return where the pieces of a document begin and end: of at most `seq_len` tokens each.

    A piece without a target is left out. Neighbouring pieces of a text share one token, so that
    every target is predicted exactly once. An example with a prompt keeps only its beginning.
    """
    end = len(document)
    stop = end - 1 if document.divisible else 1
    places = [(i, min(end, i + seq_len)) for i in range(0, max(1, stop), seq_len - 1)]
    return [(i, j) for i, j in places if document.loss_mask[i + 1 : j].any()]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Group the indices of `lengths` with sums up to `capacity`, by best fit, longest first."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # sorted: what a row has left, when it was filled, which
    for turn, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        at = bisect.bisect_left(rooms, (lengths[i], -turn, 0))
        room, _, row = rooms.pop(at) if at < len(rooms) else (capacity, 0, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(rooms, (room - lengths[i], -turn, row))
    return rows


class PackedRows:
    """Documents packed into rows of at most `seq_len` tokens.

    Args:
        sources: sequences of documents. A row holds documents of one source. `cut` shortens those
            that are longer than a row.
        seq_len: tokens per row, at least 2.
        multiple: the width of rows is a multiple of this.
    Raises:
        DataError: no document has a target within a row.

    `sources` is the number of rows of each source; they follow one another. `width` is the length
    of the longest row, and all rows are padded to it. With little data it is less than `seq_len`.
    `is_packed` is whether a row has several documents, and `most_documents` how many at most, with
    the padding at its end.
    `num_truncated` counts the examples with a prompt that were too long and lost their end.
    `num_dropped` counts those of them that have no target left, and `num_untargeted` the documents,
    of any length, that had no target at all; both are left out. `max_id` is the largest token id.
    """

    def __init__(
        self, sources: Sequence[Sequence[Document]], seq_len: int, multiple: int = 1
    ) -> None:
        self.num_truncated = self.num_dropped = self.num_untargeted = 0
        self.num_tokens = self.num_targets = longest = 0
        self.max_id = -1
        self.sources: list[int] = []
        self._documents = sources
        self._pieces: list[np.ndarray] = []  # of each source: (pieces, 3), in the order of the rows
        self._ends: list[np.ndarray] = []  # of each source: where each row ends in the pieces
        for documents in sources:
            pieces = self._cut(documents, seq_len)
            lengths = (pieces[:, 2] - pieces[:, 1]).tolist()
            rows: list[list[int]] = []
            for start in range(0, len(pieces), _WINDOW):
                found = best_fit(lengths[start : start + _WINDOW], seq_len)
                rows += [[start + i for i in row] for row in found]
            longest = max([longest, *(sum(lengths[i] for i in row) for row in rows)])
            self.num_tokens += sum(lengths)
            self._pieces.append(pieces[np.fromiter(chain.from_iterable(rows), np.int64)])
            self._ends.append(np.cumsum([0, *map(len, rows)], dtype=np.int64))
            self.sources.append(len(rows))
        if not len(self):
            raise DataError(
                f"no document has a target within the first {seq_len} tokens; use longer rows "
                "(--seq-len)"
            )
        self.width = -(-longest // multiple) * multiple
        most = max(int(np.diff(ends).max(initial=1)) for ends in self._ends)
        self.is_packed, self.most_documents = most > 1, most + (most > 1)

    def _cut(self, documents: Sequence[Document], seq_len: int) -> np.ndarray:
        """Return (document, start, stop) of each piece, and count."""
        found = array("q")
        for number, document in enumerate(documents):
            if not (targets := document.num_targets):
                self.num_untargeted += 1
                continue
            pieces = cut(document, seq_len)
            for piece in pieces:
                found.extend((number, *piece))
            if not document.divisible and len(document) > seq_len:
                self.num_truncated += 1
                self.num_dropped += not pieces
                targets = sum(int(document.loss_mask[i + 1 : j].sum()) for i, j in pieces)
            self.num_targets += targets
            if pieces:
                self.max_id = max(self.max_id, int(document.ids[: pieces[-1][1]].max()))
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return sum(self.sources)

    def fingerprint(self) -> str:
        """Return a hash of the tokens and targets of all rows, in order."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            pieces = self.documents(index)
            digest.update(f"row {len(pieces)}".encode())
            _hash(pieces, digest)
        return digest.hexdigest()

    def documents(self, index: int) -> list[Document]:
        """Return the documents of a row."""
        source = 0
        while index >= self.sources[source]:
            index -= self.sources[source]
            source += 1
        first, last = self._ends[source][index : index + 2]
        documents, pieces = self._documents[source], self._pieces[source][first:last].tolist()
        return [documents[number].part(start, stop) for number, start, stop in pieces]

    def batch(self, indices: Iterable[int]) -> Batch:
        """Return the rows with these indices, on the CPU.

        `labels` are not shifted, and are -100 where a token is no target. `position_ids` restart at
        each document.
        """
        rows = [self.documents(index) for index in indices]
        return _filled(rows, self.width, self.is_packed)


def _filled(rows: Sequence[Sequence[Document]], width: int, is_packed: bool) -> Batch:
    """Return rows of documents, one after the other, as a batch."""
    shape = (len(rows), width)
    input_ids = torch.full(shape, PAD_ID)
    labels = torch.full(shape, IGNORE_INDEX)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    num_tokens = num_targets = 0
    ends = [0]
    for at, documents in enumerate(rows):
        end = 0
        for piece in documents:
            start, end = end, end + len(piece)
            ends.append(at * width + end)
            input_ids[at, start:end] = torch.from_numpy(piece.ids.copy())
            targets = np.where(piece.loss_mask, piece.ids, IGNORE_INDEX)
            labels[at, start:end] = torch.from_numpy(targets)
            position_ids[at, start:end] = torch.arange(end - start)
            num_targets += piece.num_targets
        position_ids[at, end:] = torch.arange(width - end)
        ends += [(at + 1) * width] * (end < width)
        num_tokens += end
    starts = torch.tensor(ends, dtype=torch.int32)
    told = (starts, int(starts.diff().max())) if is_packed else (None, 0)
    return Batch(input_ids, labels, position_ids, num_tokens, num_targets, is_packed, *told)


def _hash(documents: Iterable[Document], digest: Any) -> None:
    for document in documents:
        digest.update(f"doc {len(document)}".encode())
        digest.update(np.ascontiguousarray(document.ids).tobytes())
        digest.update(np.ascontiguousarray(document.loss_mask).tobytes())


def row_order(
    num_rows: int, seed: int, *key: int, lengths: np.ndarray | None = None, near: int = 1
) -> Callable[[int], int]:
    """Return a function from a running count to a row index; each epoch has its own order.

    With lengths, the rows of each 50 batches of `near` rows are sorted, the longest first, or of
    each quarter of the rows if that is less: as the sampler of transformers does.

    The function has no state: the row depends only on `seed`, `key` and the count, so resuming is
    exact.
    """

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        order = generator(seed, 0, epoch, *key).permutation(num_rows)
        if lengths is None:
            return order
        size = near * max(1, min(num_rows // (4 * near), 50))
        parts = [order[at : at + size] for at in range(0, num_rows, size)]
        return np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])

    return lambda count: int(permutation(count // num_rows)[count % num_rows])


def mixed_order(
    sizes: Sequence[int], weights: Sequence[float], seed: int, number: int
) -> Callable[[int], int]:
    """Return a function from a running count to a row index, when sources are mixed by weights.

    The source of each count is drawn by its weight, as `datasets.interleave_datasets` does. Each
    source goes through its rows in epochs, as `row_order`. The index depends only on the seed and
    the count, so that a resumed run goes on with the same rows.

    Args: sizes: the rows of each source; weights: in any unit; number: how many counts there are.
    """
    shares = np.array(weights) / sum(weights)
    sources = generator(seed, 2).choice(len(sizes), number, p=shares)
    rows: np.ndarray = np.empty(number, np.int64)
    for source, first in enumerate(np.cumsum([0, *sizes[:-1]])):
        places = np.flatnonzero(sources == source)
        order = row_order(sizes[source], seed, source)
        rows[places] = first + np.fromiter(map(order, range(len(places))), np.int64)
    return lambda count: int(rows[count])


@dataclass(frozen=True)
class GroupBatch(Batch):
    """The rows of some groups: all first documents, then all second ones, and so on.

    Attributes:
        mask: (rows, width) bool, true at position t if t + 1 is a token of the completion: the
            place where the head speaks of that token.
        groups: the groups.
        ref_log_probs: (rows, width) float32 of the reference model, 0 outside the mask.
        sampling_log_probs: the same of the sampler that made the completions.
        advantages: (rows), for policy losses.
        kl: a scalar, for KTO.
    """

    mask: Tensor
    groups: tuple[Group, ...]
    ref_log_probs: Tensor | None = None
    sampling_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    kl: Tensor | None = None


def padded(length: int) -> int:
    """Return the width of a batch whose longest document has this length."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def stack(documents: Sequence[Document], targets_of_prompt: int = 0) -> tuple[Batch, Tensor]:
    """Return documents as the padded rows of a batch, one in each row, and their mask.

    Args: targets_of_prompt: in so many of the first documents, the prompt is a target, too.
    """
    width = padded(max(map(len, documents)))
    batch = _filled([[each] for each in documents], width, is_packed=False)
    mask = F.pad(batch.labels[:, 1:] != IGNORE_INDEX, (0, 1))
    for row, document in enumerate(documents[:targets_of_prompt]):
        batch.labels[row, 1 : len(document)] = batch.input_ids[row, 1 : len(document)]
    return replace(batch, num_targets=int((batch.labels != IGNORE_INDEX).sum())), mask


class GroupedRows:
    """Groups of documents of at most `seq_len` tokens each.

    A longer document loses its end. A group of which a document then has no target is left out.

    Args:
        prompt_targets: whether the prompts of the first documents are targets as well (ORPO).
        needs_targets: whether a document must have a target. Prompts have none.

    `num_truncated` and `num_dropped` count the groups that were cut, and those of them that were
    left out; `num_untargeted` those left out because a document had no target. `targets` are the
    numbers of targets of all documents, in order, and `reference` the reference model's
    log-probabilities of each document's targets, if a run has computed them.
    """

    is_packed, most_documents = False, 1

    def __init__(
        self,
        groups: Sequence[Group],
        seq_len: int,
        *,
        prompt_targets: bool = False,
        needs_targets: bool = True,
    ) -> None:
        self.prompt_targets = prompt_targets
        self.groups: list[Group] = []
        self.num_truncated = self.num_dropped = self.num_untargeted = 0
        for group in groups:
            if needs_targets and not all(each.num_targets for each in group.documents):
                self.num_untargeted += 1
                continue
            cut = tuple(_cut(document, seq_len) for document in group.documents)
            self.num_truncated += len(group) > seq_len
            if needs_targets and not all(document.num_targets for document in cut):
                self.num_dropped += 1
            elif not needs_targets and len(group) > seq_len:
                self.num_dropped += 1  # a prompt without its end asks for something else
            else:
                self.groups.append(Group(cut, group.label, group.record))
        if not self.groups:
            raise DataError(
                f"no example fits into {seq_len} tokens with a token of its completion; use longer "
                "rows (--seq-len), or completions that are not empty"
                if needs_targets
                else f"no prompt fits into {seq_len} tokens; use longer rows (--seq-len), or "
                "shorter completions (--max-completion-length)"
            )
        self.sources = [len(self.groups)]
        self.per_group = len(self.groups[0].documents)
        self.width = max(map(len, self.groups))
        self.max_id = max(int(each.ids.max()) for group in self.groups for each in group.documents)
        documents = [document for group in self.groups for document in group.documents]
        self.num_tokens = sum(map(len, documents))
        self.targets = [document.num_targets for document in documents]
        self.num_targets = sum(self.targets)
        self.reference: Sequence[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def fingerprint(self) -> str:
        """Return a hash of all groups, in order."""
        digest = hashlib.sha256()
        for group in self.groups:
            facts = [len(group.documents), group.label, group.record]
            digest.update(json.dumps(facts, sort_keys=True).encode())
            _hash(group.documents, digest)
        return digest.hexdigest()

    def batch(self, indices: Iterable[int]) -> GroupBatch:
        """Return the groups with these indices, on the CPU."""
        indices = list(indices)
        groups = tuple(self.groups[i] for i in indices)
        documents = [group.documents[k] for k in range(self.per_group) for group in groups]
        batch, mask = stack(documents, len(groups) if self.prompt_targets else 0)
        reference = None
        if self.reference is not None:
            reference = torch.zeros(mask.shape)
            at = [i * self.per_group + k for k in range(self.per_group) for i in indices]
            for row, number in enumerate(at):
                reference[row, mask[row]] = self.reference[number]
        return GroupBatch(**vars(batch), mask=mask, groups=groups, ref_log_probs=reference)


def _cut(document: Document, seq_len: int) -> Document:
    return replace(document.part(0, seq_len), divisible=False)
