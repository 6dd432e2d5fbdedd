"""Masks against their definition, pair by pair."""

import torch

from ligermodels.layers.masks import (
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
