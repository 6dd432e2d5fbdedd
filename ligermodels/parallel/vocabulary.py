"""The vocabulary over the ranks of a tensor-parallel group: the embedding's rows and the head's.

The loss of the head is that of `ligermodels.kernels.linear_cross_entropy.vocab_shard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.collectives import ScatterSequence
from ligermodels.parallel.layout import IndexRange, Ranges


def split_vocabulary(
    model: DecoderModel, split: Callable[[Tensor, Ranges, int], nn.Parameter], mesh: DeviceMesh
) -> None:
    """Split the embedding and the head.

    Args: split: returns this rank's ranges of a parameter in a dimension.
    """
    head, group, ranks = model.head, mesh.get_group(), mesh.size()
    vocab = head.vocab_size
    part = -(-vocab // ranks)
    ranges = tuple(
        (IndexRange(rank * part, 0, min(part, vocab - rank * part)),) for rank in range(ranks)
    )
    first = mesh.get_local_rank() * part
    embedding = model.embed_tokens
    embedding.weight = split(embedding.weight, ranges, 0)
    replace_forward(embedding, embedding_forward(embedding, first, group))
    if not head._tied:
        head.proj.weight = split(head.proj.weight, ranges, 0)
        head.proj.out_features = len(head.proj.weight)
        if head.proj.bias is not None:
            head.proj.bias = split(head.proj.bias, ranges, 0)
    head.vocab_shard = VocabShard(group, first, vocab)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a layer call the module: a module whose forward was replaced is not fused."""
    module.forward = forward  # type: ignore[method-assign]


def embedding_forward(embedding: nn.Embedding, first: int, group: Any) -> Callable[..., Any]:
    """Return a forward that looks up this rank's rows, and sums and scatters the sequence."""
    scale, padding = getattr(embedding, "scale", None), embedding.padding_idx

    def forward(ids: Tensor) -> Tensor:
        weight = embedding.weight
        here = ids - first
        mine = (here >= 0) & (here < len(weight))
        if padding is not None:
            # The padding token's embedding gets no gradient, as in nn.Embedding.
            trained = (mine & (ids != padding)).unsqueeze(-1)
        # On a GPU, the lookup of an id outside the whole vocabulary must fail, as in nn.Embedding.
        outside = (ids < 0) | (ids >= embedding.num_embeddings)
        rows = F.embedding(torch.where(mine, here, outside * len(weight)), weight)
        if padding is not None:
            rows = torch.where(trained, rows, rows.detach())
        rows = rows.masked_fill(~mine.unsqueeze(-1), 0.0)
        rows = ScatterSequence.apply(rows, group)
        if scale is None:
            return rows
        return rows * torch.full((), scale, dtype=rows.dtype, device=rows.device)

    return forward
