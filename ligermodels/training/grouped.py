"""Rows that belong together: a pair of completions, a completion and another one, or a prompt.

Unlike `packing`, a row holds one document, because preference losses compare whole completions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.errors import DataError
from ligermodels.training.data import Document
from ligermodels.training.packing import IGNORE_INDEX, PAD_ID, Batch

_MULTIPLE = 64  # a batch is as long as its longest row, rounded up to a multiple of this


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
    record: dict[str, Any] = field(default_factory=dict)
    divisible = False

    def __len__(self) -> int:
        return max(map(len, self.documents))


@dataclass(frozen=True)
class GroupBatch(Batch):
    """The rows of some groups: all first documents, then all second ones, and so on.

    Attributes:
        mask: (rows, width) bool, true at position t if t + 1 is a token of the completion: the
            place where the head speaks of that token.
        groups: the groups.
        ref_log_probs: (rows, width) float32 of the reference model, 0 outside the mask.
        advantages: (rows), for policy losses.
        kl: a scalar, for KTO.
    """

    mask: Tensor
    groups: tuple[Group, ...]
    ref_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    kl: Tensor | None = None


def padded(length: int) -> int:
    """Return the width of a batch whose longest document has this length."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def stack(documents: Sequence[Document], targets_of_prompt: int = 0) -> tuple[Batch, Tensor]:
    """Return documents as the padded rows of a batch, one in each row, and their mask.

    Args: targets_of_prompt: in so many of the first documents, the prompt is a target, too.
    """
    shape = len(documents), padded(max(map(len, documents)))
    input_ids, labels = torch.full(shape, PAD_ID), torch.full(shape, IGNORE_INDEX)
    mask = torch.zeros(shape, dtype=torch.bool)
    # The padding counts as another document, as in packed rows.
    position_ids = torch.arange(shape[1]).repeat(shape[0], 1)
    for row, document in enumerate(documents):
        end = len(document)
        ids = torch.from_numpy(document.ids.astype(np.int64))
        chosen = torch.from_numpy(document.loss_mask)
        input_ids[row, :end] = ids
        mask[row, : end - 1] = chosen[1:]
        if row < targets_of_prompt:
            chosen = torch.arange(end) > 0
        labels[row, :end] = torch.where(chosen, ids, IGNORE_INDEX)
        position_ids[row, end:] = torch.arange(shape[1] - end)
    num_tokens, num_targets = sum(map(len, documents)), int((labels != IGNORE_INDEX).sum())
    return Batch(input_ids, labels, position_ids, num_tokens, num_targets), mask


class GroupedRows:
    """Groups of documents of at most `seq_len` tokens each.

    A longer document loses its end. A group of which a document then has no target is left out.

    Args:
        prompt_targets: whether the prompts of the first documents are targets as well (ORPO).
        needs_targets: whether a document must have a target. Prompts have none.

    `num_truncated` and `num_dropped` count the groups that were cut, and those of them that were
    left out; `num_untargeted` those left out because a document had no target. `reference` holds
    the reference model's log-probabilities of all targets, in order, if a run has computed them.
    """

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
        self.per_group = len(self.groups[0].documents)
        self.width = max(map(len, self.groups))
        documents = [document for group in self.groups for document in group.documents]
        self.num_tokens = sum(map(len, documents))
        self.num_targets = sum(document.num_targets for document in documents)
        self._ends = np.cumsum([document.num_targets for document in documents])
        self.reference: Tensor | None = None

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def max_id(self) -> int:
        """The largest token id in the rows."""
        return max(int(d.ids.max()) for group in self.groups for d in group.documents)

    def fingerprint(self) -> str:
        """Return a hash of all groups, in order."""
        digest = hashlib.sha256()
        for group in self.groups:
            facts = [len(group.documents), group.label, group.record]
            digest.update(json.dumps(facts, sort_keys=True).encode())
            for document in group.documents:
                digest.update(f"doc {len(document)}".encode())
                digest.update(np.ascontiguousarray(document.ids).tobytes())
                digest.update(np.ascontiguousarray(document.loss_mask).tobytes())
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
                end = int(self._ends[number])
                count = documents[row].num_targets
                reference[row, mask[row]] = self.reference[end - count : end]
        return GroupBatch(**vars(batch), mask=mask, groups=groups, ref_log_probs=reference)


def _cut(document: Document, seq_len: int) -> Document:
    return Document(document.ids[:seq_len], document.loss_mask[:seq_len], divisible=False)
