"""Masks against their definition, for each pair of a query and a key."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from ligermodels.layers import attention_mask
from ligermodels.layers.attention_mask import (
    AttentionMask,
    check_cu_seqlens,
    document_ids_from_positions,
    positions_from_cu_seqlens,
)
from ligermodels.layers.sequence_shard import SequenceShard


def test_document_ids_and_positions() -> None:
    ends = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    assert positions_from_cu_seqlens(ends, 1, 6).tolist() == [[0, 1, 2, 0, 0, 1]]
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [5, 6, 0, 1, 2, 3]])
    assert document_ids_from_positions(positions).tolist() == [
        [0, 0, 0, 1, 2, 2],
        [0, 0, 1, 1, 1, 1],
    ]


def test_dense_pair_by_pair() -> None:
    keys = 7
    for window, queries, packed, padded, causal, prefix in product(
        (None, 1, 3, 50), (7, 3, 1), (False, True), (False, True), (True, False), (None, (4, -2))
    ):
        case = (
            f"window {window}, {queries} queries, packed {packed}, padded {padded}, causal "
            f"{causal}, prefix {prefix}"
        )
        documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0] * 7]) if packed else None
        tokens = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]) if padded else None
        mask = AttentionMask(
            queries,
            keys,
            document_ids=documents,
            padding_mask=tokens,
            prefix_lengths=None if prefix is None else torch.tensor(prefix),
        )
        dense = mask.dense(window, torch.device("cpu"), causal=causal)
        assert dense.shape[1:] == (1, queries, keys), case
        for row, query, key in product(range(2), range(keys - queries, keys), range(keys)):
            sees = abs(query - key) < (window or keys)
            sees = sees and (not causal or key <= query or key < (prefix or (0, 0))[row])
            if documents is not None:
                sees = sees and bool(documents[row, key] == documents[row, query])
            if tokens is not None:
                sees = sees and bool(tokens[row, key])
            got = dense.expand(2, -1, -1, -1)[row, 0, query - (keys - queries), key]
            assert bool(got) == sees, f"{case}: row {row}, query {query}, key {key}"
        whole = not packed and not padded and (window is None or window >= keys)
        assert mask.is_causal(window) == (queries == keys and whole and not prefix), case
        assert mask.hides_nothing(window) == (queries == 1 and whole), case
        assert mask.hides_nothing(window, causal=False) == whole, case


def test_dense_for_the_key_positions_that_a_cache_holds() -> None:
    key_positions = torch.tensor([8, 5, 6, 7])  # a ring buffer of four; the newest is first
    tokens = torch.ones(1, 9, dtype=torch.int64)
    tokens[0, 6] = 0
    mask = AttentionMask(1, 9, padding_mask=tokens)
    dense = mask.dense(4, torch.device("cpu"), key_positions)
    assert dense.tolist() == [[[[True, True, False, True]]]]
    other = mask.dense(4, torch.device("cpu"), torch.tensor([0, 8]))  # of another layer
    assert other.tolist() == [[[[False, True]]]]
    assert AttentionMask(1, 9).hides_nothing(4, key_positions)
    assert not AttentionMask(1, 9).hides_nothing(3, key_positions)


def test_a_mask_given_by_the_caller() -> None:
    visible = torch.ones(1, 1, 4, 4, dtype=torch.bool)  # every token sees all, also the future
    mask = AttentionMask(4, mask=visible)
    assert not mask.is_causal(None)
    assert torch.equal(mask.dense(None, torch.device("cpu")), visible)
    assert mask.dense(2, torch.device("cpu"))[0, 0].tolist() == [
        [True, True, False, False],
        [True, True, True, False],
        [False, True, True, True],
        [False, False, True, True],
    ]


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    integers = torch.ones(2, 4, dtype=torch.int64)
    for given, complaint in (
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, r"\(batch, 1, 4, 4\) and torch.bool"),
        ({"mask": torch.zeros(2, 1, 4, 4)}, "torch.float32; expected .* True where a query sees"),
        ({"mask": torch.ones(2, 2, 4, 4, dtype=torch.bool)}, r"has shape \(2, 2, 4, 4\)"),
        ({"padding_mask": torch.zeros(1, 4)}, r"padding_mask .* expected .* integers or bools"),
        ({"padding_mask": [1, 1, 1, 1]}, "padding_mask is a list; expected a tensor"),
        ({"padding_mask": integers[:, :3]}, r"padding_mask has shape \(2, 3\).*\(batch, 4\)"),
        ({"document_ids": integers.float()}, "document_ids .* torch.float32; expected .* integers"),
        ({"prefix_lengths": integers}, r"prefix_lengths has shape \(2, 4\).*\(batch,\)"),
        ({"prefix_lengths": integers[:, 0].bool()}, "prefix_lengths .* torch.bool; .* integers"),
    ):
        with pytest.raises(ValueError, match=complaint):
            AttentionMask(4, **given)
    with pytest.raises(ValueError, match="a key for each query, but there are 4"):
        AttentionMask(4, keys=2, document_ids=integers[:, :2])


def test_ends_of_rows_and_of_documents() -> None:
    ends, _, longest, *_ = AttentionMask(5).varlen_seqlens(3, torch.device("cpu"))
    assert ends.tolist() == [0, 5, 10, 15] and ends.dtype == torch.int32 and longest == 5
    given = torch.tensor([0, 2, 5])
    mask = AttentionMask(5, cu_seqlens=given, max_seqlen=3)
    ends, _, longest, *_ = mask.varlen_seqlens(1, given.device)
    assert ends.tolist() == [0, 2, 5] and ends.dtype == torch.int32 and longest == 3


def test_malformed_cu_seqlens() -> None:
    for ends, longest, complaint in (
        ([0, 5], None, "rise from 0 to 8"),
        ([0, 3, 20], None, "rise from 0 to 8"),
        ([1, 5, 8], None, "rise from 0 to 8"),
        ([0, 5, 3, 8], None, "rise from 0 to 8"),
        ([0, 4, 4, 8], None, "rise from 0 to 8"),
        ([], None, "rise from 0 to 8"),
        ([[0, 8]], None, "of shape"),
        ([0.0, 8.0], None, "float32"),
        ([0, 6, 8], 5, "max_seqlen 5: .* 6 tokens"),
        *(([0, 8], x, "max_seqlen=.*; expected an integer") for x in (0, 8.5, True, "8")),
    ):
        tensor = torch.tensor(ends, dtype=None if ends else torch.int32)
        with pytest.raises(ValueError, match=complaint):
            check_cu_seqlens(tensor, 1, 8, longest)
    check_cu_seqlens(torch.tensor([0, 3, 4, 8]), 2, 4, 4)
    with pytest.raises(ValueError, match="have the start of each row"):
        check_cu_seqlens(torch.tensor([0, 3, 8]), 2, 4, None)


def test_a_compiled_function_does_not_look_at_cu_seqlens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_cu_seqlens(torch.tensor([0, 20]), 1, 8, None)
    with pytest.raises(ValueError, match="of shape"):
        check_cu_seqlens(torch.tensor([[0, 8]]), 1, 8, None)


def test_padding_at_the_ends_of_rows_divides_them_into_documents() -> None:
    rows = ["0011", "1110", "0110", "1111", "0000"]
    tokens = torch.tensor([[int(x) for x in row] for row in rows])
    mask = AttentionMask(4, padding_mask=tokens, padding_at_ends=True)
    ends, _, longest, *_ = mask.varlen_seqlens(len(rows), tokens.device)
    assert longest == 4 and ends.dtype == torch.int32 and not mask.fault.any()
    documents = torch.searchsorted(ends.long(), torch.arange(tokens.numel()), right=True)
    same = AttentionMask(4, document_ids=documents.view_as(tokens))
    for window, causal in product((None, 2), (True, False)):
        for row, expected in enumerate(mask.dense(window, tokens.device, causal=causal)):
            found = same.dense(window, tokens.device, causal=causal)[row]
            queries = tokens[row].bool()  # what padding sees is not specified
            assert torch.equal(found[:, queries], expected[:, queries]), (row, window, causal)


def test_padding_between_tokens_is_a_fault_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in ("1011", "0101", "1001"):
        tokens = torch.tensor([[1, 1, 1, 1], [int(x) for x in row]])
        mask = AttentionMask(4, padding_mask=tokens, padding_at_ends=True)
        with pytest.raises(ValueError, match="row 1 has padding between its tokens"):
            mask.varlen_seqlens(2, tokens.device)
        with monkeypatch.context() as patch:  # as on a GPU, where the host does not wait
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            mask.varlen_seqlens(2, tokens.device)
        assert mask.fault is not None and mask.fault.isnan().flatten().tolist() == [False, True]
        assert mask.to(torch.device("cpu")).padding_at_ends


def test_block_masks_are_the_dense_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, FlexAttention's functions give the mask pair by pair."""
    monkeypatch.setattr(attention_mask, "compiled", lambda function: function)
    cpu, keys = torch.device("cpu"), 7
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0] * 7])
    tokens = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    for queries, causal, options in (
        (7, True, {}),
        (7, False, {}),
        (3, True, {}),
        (7, True, {"document_ids": documents}),
        (3, False, {"padding_mask": tokens}),
        (7, True, {"prefix_lengths": torch.tensor((4, 0))}),
        (7, True, {"document_ids": documents, "prefix_lengths": torch.tensor((4, 0))}),
    ):
        mask = AttentionMask(queries, keys, **options)
        for window in (None, 3):
            blocks = mask.block_mask(window, 2, cpu, causal=causal)
            found = create_mask(blocks.mask_mod, 2, 1, queries, keys, device="cpu")
            expected = mask.dense(window, cpu, causal=causal).expand_as(found)
            assert torch.equal(found, expected), (queries, causal, options, window)
            assert mask.block_mask(window, 2, cpu, causal=causal) is blocks
    held = torch.tensor([6, 3, 4, 5])  # a ring buffer of four; the newest is first
    mask = AttentionMask(1, keys, padding_mask=tokens)
    found = create_mask(mask.block_mask(4, 2, cpu, held).mask_mod, 2, 1, 1, 4, device="cpu")
    assert torch.equal(found, mask.dense(4, cpu, held))


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("documents", [None, [0, 3, 6, 18, 19, 24], [0, 24]])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_varlen_kernel_sees_what_the_mask_of_a_part_shows(
    rank: int, documents: list[int] | None, window: int | None
) -> None:
    seq = 24
    given: dict[str, Any] = {}
    if documents is not None:
        ends = torch.tensor(documents)
        given = {"cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}
        positions = positions_from_cu_seqlens(ends, 1, seq)
        given["document_ids"] = document_ids_from_positions(positions)
    mask = AttentionMask(seq // 3, seq, shard=SequenceShard(None, 3, rank), **given)
    device = torch.device("cpu")
    for part in mask.parts(True):
        made = part.varlen_seqlens(1, device, window)
        size = part.past + part.queries - made.first_key
        shown = torch.zeros(part.queries, size, dtype=torch.bool)
        for i in range(len(made.queries) - 1):
            (q, q_end), (k, k_end) = made.queries[i : i + 2], made.keys[i : i + 2]
            assert q_end - q <= made.max_queries and k_end - k <= made.max_keys
            last = torch.arange(k_end - (q_end - q), k_end)[:, None]
            key = torch.arange(k, k_end)
            reach = seq if window is None else min(window, made.max_keys)
            shown[q:q_end, k:k_end] = (key <= last) & (key > last - reach)
        expected = part.dense(window, device)[0, 0]
        assert not expected[:, : made.first_key].any()
        assert torch.equal(shown, expected[:, made.first_key :])
        if made.seen is not None:
            assert not shown[:, ~made.seen].any()
