"""Packing: every target occurs once, boundaries are kept, and the seed gives the order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from ligermodels.errors import DataError
from ligermodels.training.data import Document, Group
from ligermodels.training.packing import (
    IGNORE_INDEX,
    GroupedRows,
    PackedRows,
    best_fit,
    cut,
    hold_out,
    mixed_order,
    row_order,
    stack,
)


def text(length, first=100):
    loss_mask = np.ones(length, dtype=bool)
    loss_mask[0] = False
    return Document(np.arange(first, first + length, dtype=np.int32), loss_mask)


def example(prompt, completion, first=100):
    loss_mask = np.array([False] * prompt + [True] * completion)
    ids = np.arange(first, first + prompt + completion, dtype=np.int32)
    return Document(ids, loss_mask, divisible=False)


def random_documents(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return [text(int(n), first=1000 * i) for i, n in enumerate(rng.integers(2, longest, count))]


def test_a_row_holds_documents_with_positions_that_restart():
    rows = PackedRows([[text(3, 10), text(4, 20)]], seq_len=8)
    assert (len(rows), rows.width) == (1, 7)
    batch = rows.batch([0])
    assert batch.input_ids.tolist() == [[20, 21, 22, 23, 10, 11, 12]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.labels.tolist() == [[-100, 21, 22, 23, -100, 11, 12]]
    assert (batch.num_tokens, batch.num_targets) == (7, 5)


def test_padding_is_a_document_of_its_own_without_targets():
    rows = PackedRows([[text(5, 10), text(3, 20), text(3, 30)]], seq_len=6)
    batch = rows.batch([0, 1])
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 0], [20, 21, 22, 30, 31, 32]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2]]
    assert batch.labels[0, 5] == IGNORE_INDEX


def test_prompts_are_no_targets():
    batch = PackedRows([[example(3, 2), text(2, 50)]], seq_len=8).batch([0])
    assert batch.labels.tolist() == [[-100, -100, -100, 103, 104, -100, 51]]


def test_every_target_of_a_text_is_predicted_exactly_once(subtests):
    for seq_len in (2, 3, 7, 16, 64):
        with subtests.test(str(seq_len)):
            documents = random_documents(50)
            rows = PackedRows([documents], seq_len)
            batch = rows.batch(range(len(rows)))
            found = batch.labels[batch.labels != IGNORE_INDEX]
            wanted = torch.cat([torch.from_numpy(d.ids[1:]) for d in documents])
            assert torch.equal(found.sort().values, wanted.long().sort().values)
            assert batch.num_targets == rows.num_targets == len(wanted)


def test_a_target_is_preceded_by_its_own_documents_token_and_never_at_a_start(subtests):
    for seq_len in (2, 5, 33):
        with subtests.test(str(seq_len)):
            rows = PackedRows([random_documents(40, seed=1)], seq_len)
            batch = rows.batch(range(len(rows)))
            at_start = batch.position_ids == 0
            assert (batch.labels[at_start] == IGNORE_INDEX).all()
            row, column = torch.nonzero(batch.labels != IGNORE_INDEX, as_tuple=True)
            # These documents count upwards, so the token before a target is smaller by one.
            assert torch.equal(batch.input_ids[row, column - 1] + 1, batch.labels[row, column])
            assert torch.equal(
                batch.position_ids[row, column - 1] + 1, batch.position_ids[row, column]
            )


def test_an_example_that_is_too_long_keeps_its_beginning_and_is_counted():
    rows = PackedRows([[example(3, 9), example(8, 2), text(4)]], seq_len=6)
    assert (rows.num_truncated, rows.num_dropped) == (2, 1)
    assert sorted(piece.num_targets for piece in rows.documents(0) + rows.documents(1)) == [3, 3]
    assert cut(example(8, 2), 6) == []


def test_nothing_that_fits_a_row_is_an_error():
    with pytest.raises(DataError, match="first 6 tokens"):
        PackedRows([[example(8, 2)]], seq_len=6)


def test_best_fit_fills_rows_and_never_beyond():
    lengths = np.random.default_rng(3).integers(1, 100, 500).tolist()
    groups = best_fit(lengths, 100)
    assert sorted(i for group in groups for i in group) == list(range(500))
    used = [sum(lengths[i] for i in group) for group in groups]
    assert max(used) <= 100
    assert len(groups) <= 1.03 * sum(lengths) / 100 + 1
    assert best_fit([60, 50, 40, 50], 100) == [[0, 2], [1, 3]]


def test_holding_out_takes_whole_documents_by_the_seed():
    documents = random_documents(100)
    train, held = hold_out(documents, 0.1, seed=5)
    assert (len(train), len(held)) == (90, 10)
    again, other = hold_out(documents, 0.1, seed=5), hold_out(documents, 0.1, seed=6)
    assert [d.ids[0] for d in again[1]] == [d.ids[0] for d in held]
    assert [d.ids[0] for d in other[1]] != [d.ids[0] for d in held]
    assert sorted(d.ids[0] for d in [*train, *held]) == sorted(d.ids[0] for d in documents)


def test_holding_out_of_one_long_text_takes_its_end():
    (train,), (held,) = hold_out([text(200)], 0.1, seed=0)
    assert train.num_targets + held.num_targets == 199
    assert held.ids[0] == train.ids[-1] and not held.loss_mask[0]
    assert held.num_targets == 20


def test_of_too_few_examples_one_is_held_out_of_a_single_source():
    few = [example(2, 2), example(2, 3)]
    assert [len(part) for part in hold_out(few, 0.05, seed=0)] == [1, 1]
    assert [len(part) for part in hold_out(few, 0.05, seed=0, alone=False)] == [2, 0]
    assert hold_out([text(3)], 0.05, seed=0)[1] == hold_out([text(3)], 0.0, seed=0)[1] == []


def test_an_epoch_visits_every_row_once_and_the_next_in_another_order():
    order = row_order(20, seed=1)
    first = [order(i) for i in range(20)]
    second = [order(i) for i in range(20, 40)]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    # the order has no state, so a resumed run gets the same order from the middle
    assert [row_order(20, seed=1)(i) for i in range(15, 25)] == (first + second)[15:25]
    assert [row_order(20, seed=2)(i) for i in range(20)] != first


def test_the_fingerprint_tells_ids_targets_and_rows_apart():
    base = PackedRows([[text(4), text(5, 50)]], 16).fingerprint()
    assert PackedRows([[text(4), text(5, 50)]], 16).fingerprint() == base
    others = [
        PackedRows([[text(4), text(5, 51)]], 16),
        PackedRows([[example(2, 2), text(5, 50)]], 16),
        PackedRows([[text(4), text(5, 50)]], 5),
    ]
    assert len({base, *(rows.fingerprint() for rows in others)}) == 4


def test_mixed_sources_have_their_shares_and_no_row_comes_twice_in_an_epoch():
    sizes, weights, number = [30, 400, 50], [3, 1, 0.002], 8000
    order = mixed_order(sizes, weights, 4, number)
    found = [order(i) for i in range(number)]
    starts = [0, 30, 430, 480]
    of_source = [[row for row in found if a <= row < b] for a, b in pairwise(starts)]
    for rows, size, weight in zip(of_source, sizes, weights):
        assert len(rows) / number == pytest.approx(weight / sum(weights), abs=0.02)
        for start in range(0, len(rows) - size + 1, size):  # each epoch
            assert len({*rows[start : start + size]}) == size
    # It has no state, so a resumed run goes on with the same rows.
    again, other = (mixed_order(sizes, weights, seed, number) for seed in (4, 5))
    assert [*map(again, range(1234, 1300))] == found[1234:1300]
    assert [*map(other, range(number))] != found


def test_a_row_holds_documents_of_one_source():
    one, two = random_documents(30, 1), [example(3, 2, first=90_000) for _ in range(9)]
    rows = PackedRows([one, two], 64)
    assert len(rows) == sum(rows.sources)
    for index in range(len(rows)):
        firsts = {piece.ids[0] >= 90_000 for piece in rows.documents(index)}
        assert firsts == {index >= rows.sources[0]}


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
