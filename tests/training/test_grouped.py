"""Rows that belong together: their batches, masks and stored reference values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ligermodels.errors import DataError
from ligermodels.training.data import Document, Group
from ligermodels.training.packing import GroupedRows, stack


def document(length: int, prompt: int, first: int = 1) -> Document:
    ids = np.arange(first, first + length, dtype=np.int32)
    return Document(ids, np.arange(length) >= prompt, divisible=False)


GROUPS = [
    Group((document(5, 2), document(4, 2, 20))),
    Group((document(70, 3, 50), document(6, 3, 150)), record={"id": 1}),
    Group((document(3, 1, 200), document(7, 1, 210))),
]


def test_a_batch_holds_all_first_documents_and_then_all_second_ones() -> None:
    rows = GroupedRows(GROUPS, 80)
    assert len(rows) == 3 and rows.width == 70 and rows.max_id == 216
    assert rows.num_tokens == 95 and rows.num_targets == 3 + 2 + 67 + 3 + 2 + 6
    batch = rows.batch([2, 0])
    assert batch.input_ids.shape == (4, 64)  # rounded up to a multiple of 64
    assert batch.input_ids[:, 0].tolist() == [200, 1, 210, 20]
    assert [id(g) for g in batch.groups] == [id(rows.groups[i]) for i in (2, 0)]
    assert batch.mask.sum(1).tolist() == [2, 3, 6, 2]
    assert batch.num_targets == 13 and batch.num_tokens == 19
    assert batch.labels[1, :6].tolist() == [-100, -100, 3, 4, 5, -100]
    # The head speaks of token t + 1 at position t.
    assert batch.mask[1, :5].tolist() == [False, True, True, True, False]
    # The padding is a document of its own.
    assert batch.position_ids[1, :8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows.batch([1]).input_ids.shape == (2, 128)


def test_prompts_as_targets() -> None:
    batch = GroupedRows(GROUPS, 80, prompt_targets=True).batch([0])
    assert batch.labels[0, :6].tolist() == [-100, 2, 3, 4, 5, -100]
    assert batch.labels[1, :5].tolist() == [-100, -100, 22, 23, -100]
    assert batch.mask.sum(1).tolist() == [3, 2]
    assert batch.num_targets == 6


def test_long_documents_are_cut_and_groups_without_targets_left_out() -> None:
    rows = GroupedRows(GROUPS, 6)
    assert rows.num_truncated == 2 and rows.num_dropped == 0 and rows.width == 6
    assert GroupedRows(GROUPS, 2).num_dropped == 2
    with pytest.raises(DataError, match="no example fits into 1 tokens"):
        GroupedRows(GROUPS, 1)
    bare = [Document(g.documents[0].ids, g.documents[0].loss_mask & False) for g in GROUPS]
    prompts = [Group((document,)) for document in bare]
    kept = GroupedRows(prompts, 10, needs_targets=False)
    assert len(kept) == 2 and kept.num_dropped == 1


def test_stored_values_stand_where_the_mask_is() -> None:
    rows = GroupedRows(GROUPS, 80)
    rows.reference = torch.arange(float(rows.num_targets)).split(rows.targets)
    batch = rows.batch([2, 0])
    assert batch.ref_log_probs is not None
    found = [batch.ref_log_probs[row][batch.mask[row]].tolist() for row in range(4)]
    assert found == [[75, 76], [0, 1, 2], [77, 78, 79, 80, 81, 82], [3, 4]]
    assert batch.ref_log_probs[~batch.mask].eq(0).all()


def test_the_fingerprint_knows_every_difference() -> None:
    first = Group((document(5, 2),))
    others = [
        Group((document(5, 3),)),
        Group((document(5, 2, 2),)),
        Group((document(5, 2),), label=False),
        Group((document(5, 2),), record={"x": 1}),
        Group((document(5, 2), document(5, 2))),
    ]
    hashes = {GroupedRows([each], 9).fingerprint() for each in (first, *others)}
    assert len(hashes) == 6


def test_stack() -> None:
    batch, mask = stack([document(2, 1), document(64, 63)])
    assert batch.input_ids.shape == mask.shape == (2, 64)
    assert mask.sum() == 2 and mask[0, 0] and mask[1, 62]
