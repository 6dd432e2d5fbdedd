"""Masks against their definition, pair by pair."""

import pytest
import torch

from ligermodels.layers.masks import (
    check_cu_seqlens,
    document_ids,
    document_mask,
    padding_mask,
    positions_from_cu_seqlens,
)


def test_document_ids() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [5, 6, 0, 1, 2, 3]])
    assert document_ids(positions).tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 1, 1]]


def test_positions_from_cu_seqlens() -> None:
    ends = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    assert positions_from_cu_seqlens(ends, 1, 6).tolist() == [[0, 1, 2, 0, 0, 1]]


def test_document_mask() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    mask = document_mask(positions)
    assert mask.shape == (2, 1, 5, 5)
    documents = [[0, 0, 1, 1, 1], [0] * 5]
    for row in range(2):
        for query in range(5):
            for key in range(5):
                sees = key <= query and documents[row][key] == documents[row][query]
                assert mask[row, 0, query, key] == sees


def test_padding_mask_of_the_last_queries() -> None:
    marked = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    mask = padding_mask(marked, 2)
    assert mask[:, 0].tolist() == [
        [[False, True, True, False], [False, True, True, True]],
        [[True, True, True, False], [True, True, True, False]],
    ]


@pytest.mark.parametrize(
    "ends, longest, complaint",
    [
        ([0, 5], None, "rise from 0 to 8"),
        ([0, 3, 20], None, "rise from 0 to 8"),
        ([1, 5, 8], None, "rise from 0 to 8"),
        ([0, 5, 3, 8], None, "rise from 0 to 8"),
        ([0, 4, 4, 8], None, "rise from 0 to 8"),
        ([], None, "rise from 0 to 8"),
        ([[0, 8]], None, "of shape"),
        ([0.0, 8.0], None, "float32"),
        ([0, 6, 8], 5, "max_seqlen 5: .* 6 tokens"),
    ],
)
def test_malformed_cu_seqlens(ends: list, longest: int | None, complaint: str) -> None:
    tensor = torch.tensor(ends, dtype=None if ends else torch.int32)
    with pytest.raises(ValueError, match=complaint):
        check_cu_seqlens(tensor, 8, longest)
