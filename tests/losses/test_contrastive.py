"""InfoNCE against a plain cross entropy over the whole matrix of products, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels.losses.contrastive import info_nce
from tests.losses.batches import assert_refused, assert_same


def vectors(rows: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return F.normalize(torch.randn(rows, 6, dtype=dtype), dim=-1).requires_grad_()


def test_equals_the_whole_matrix() -> None:
    torch.manual_seed(0)
    queries, documents = vectors(5), vectors(9)  # four hard negatives
    for chunk_size in (None, 1, 2):
        loss, metrics = info_nce(queries, documents, temperature=0.1, chunk_size=chunk_size)
        products = queries @ documents.T / 0.1
        expected = F.cross_entropy(products, torch.arange(5))
        assert_same(loss, expected, queries, documents)
        right = (products.argmax(1) == torch.arange(5)).double().mean()
        assert float(metrics["accuracy"].value) == pytest.approx(float(right))
    positives = torch.tensor([8, 0, 3, 3, 1])
    loss = info_nce(queries, documents, positives, temperature=0.1).loss
    torch.testing.assert_close(loss, F.cross_entropy(products, positives))
    whole = info_nce(queries, documents).loss
    parts = [
        info_nce(queries[rows], documents, torch.arange(5)[rows], normalizer=5).loss
        for rows in (slice(2), slice(2, 5))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_symmetric_and_a_single_pair() -> None:
    torch.manual_seed(0)
    queries, documents = vectors(4), vectors(4)
    products, targets = queries @ documents.T / 0.05, torch.arange(4)
    expected = (F.cross_entropy(products, targets) + F.cross_entropy(products.T, targets)) / 2
    loss = info_nce(queries, documents, symmetric=True).loss
    assert_same(loss, expected, queries, documents)
    assert info_nce(queries[:1], documents[:1]).loss.abs() < 1e-12


def test_what_is_refused() -> None:
    a, b = vectors(4), vectors(5)
    assert_refused(
        ("temperature: must be more than 0", lambda: info_nce(a, b, temperature=0)),
        ("documents: 4 for 5 queries", lambda: info_nce(b, a)),
        ("symmetric: needs one document", lambda: info_nce(a, b, symmetric=True)),
        (r"queries \(4, 6\) and documents \(5, 5\)", lambda: info_nce(a, b[:, 1:])),
    )
