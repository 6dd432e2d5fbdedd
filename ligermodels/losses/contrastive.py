"""The contrastive loss of embedding models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.kernels import linear_cross_entropy
from ligermodels.losses.terms import LossOutput, mean_of


def info_nce(
    queries: Tensor,
    documents: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: float = 0.05,
    symmetric: bool = False,
    normalizer: float | Tensor | None = None,
    **options: Any,
) -> LossOutput:
    """Return InfoNCE with in-batch negatives (van den Oord et al. 2018, arXiv 1807.03748).

    Each query is to find its own document among all documents: a cross entropy over the products
    queries documents^T / temperature. The matrix of products is computed chunk by chunk of queries,
    as the logits of a loss head, so a large batch needs no matrix of queries by documents.

    Args:
        queries: (queries, dim), usually of length 1.
        documents: (documents, dim), in the same dtype. Those that are no query's own are hard
            negatives. With several ranks, gather the documents of all.
        positives: (queries) int64, the row of each query's document; by default 0, 1, 2, ...
        temperature: the divisor of the products.
        symmetric: whether to return the mean of this loss and the one in which each document is to
            find its query. There must be as many documents as queries.
        normalizer: the number of queries of the whole step.
        options: chunk_size and max_scratch_bytes, as in `ligermodels.kernels.linear_cross_entropy`.
    Returns: the loss and the metric accuracy.
    Raises:
        ConfigError: a shape or an option is wrong.
    """
    if queries.dim() != 2 or documents.dim() != 2 or queries.shape[1] != documents.shape[1]:
        raise ConfigError(
            f"queries {tuple(queries.shape)} and documents {tuple(documents.shape)}; expected "
            "(queries, dim) and (documents, dim)"
        )
    if temperature <= 0:
        raise ConfigError(f"temperature: must be more than 0, not {temperature}")
    if symmetric and (positives is not None or len(queries) != len(documents)):
        raise ConfigError("symmetric: needs one document for each query, in the same order")
    if positives is None and len(queries) > len(documents):
        raise ConfigError(
            f"documents: {len(documents)} for {len(queries)} queries; expected as many"
        )
    if positives is None:
        positives = torch.arange(len(queries), device=queries.device)

    def one_way(rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = linear_cross_entropy(
            rows,
            columns,
            targets,
            logit_scale=1 / temperature,
            normalizer=normalizer,
            return_token_stats=True,
            **options,
        )
        assert found.correct is not None
        return found.loss, found.correct

    loss, correct = one_way(queries, documents, positives)
    if symmetric:
        loss = (loss + one_way(documents, queries, positives)[0]) / 2
    return LossOutput(loss, {"accuracy": mean_of(correct.float())})
