"""The part of each row that a rank computes under context parallelism.

A row is cut into 2 * ranks chunks, and rank r has the chunks r and 2 * ranks - 1 - r. In a causal
layer, the work of a query grows with its position, so that all ranks have the same work. Keys and
values of all ranks are gathered in each layer, which grouped heads make small, and the queries
stay.

Gradients are averaged over the ranks after backward. The operations here account for this: every
rank computes the same loss, and its gradients are its part of the gradient of the sum of the losses
of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.linear_cross_entropy.vocab_shard import (
    all_gather,
    exchanged,
    reduce_scatter,
    summed,
)
from ligermodels.kernels.loss_options import target_weight_sum
from ligermodels.layers.loss_head import HeadOptions, HeadOutput, LossHead


@dataclass(frozen=True)
class SequenceShard:
    """The chunks of a row that this rank has.

    Attributes:
        group: the ranks that have a row together.
        ranks, rank: their number, and this one's place among them.
    """

    group: Any
    ranks: int
    rank: int

    def check(self, seq: int) -> None:
        """Raise ValueError unless rows of this length can be cut into chunks."""
        if seq % (2 * self.ranks):
            raise ValueError(
                f"context parallelism: a row has {seq} tokens, which {self.ranks} ranks cannot "
                f"split; pad the rows to a multiple of {2 * self.ranks}"
            )

    def chunks(self, seq: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first token and the end of each of this rank's two chunks."""
        size = seq // (2 * self.ranks)
        first, second = self.rank * size, (2 * self.ranks - 1 - self.rank) * size
        return (first, first + size), (second, second + size)

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a tensor of whole rows."""
        chunks = self.chunks(x.shape[dim])
        return torch.cat([x.narrow(dim, start, end - start) for start, end in chunks], dim)

    def whole(self, x: Tensor) -> Tensor:
        """Return (batch, seq, ...) from each rank's (batch, seq / ranks, ...)."""
        if x.dtype == torch.bool:
            return self.whole(x.to(torch.uint8)).bool()
        return exchanged(x, _whole, _summed_part, self)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        return exchanged(x, summed, summed, self.group)

    def loss(
        self, head: LossHead, hidden: Tensor, targets: Tensor, options: HeadOptions
    ) -> HeadOutput:
        """Return the head's output for whole rows, of which each rank has a part.

        Args: hidden (batch, seq / ranks, hidden), of this rank; targets (batch, seq).
        Raises:
            ValueError: there is a loss_function, which needs whole rows.
        """
        given: dict[str, Any] = {**options}
        if given.get("loss_function") is not None:
            raise ValueError(
                "loss_function: it needs whole rows, and each rank has a part of them (context "
                "parallelism); ask for return_token_stats with reduction='none' instead"
            )
        for name in ("token_weights", "alternatives"):
            if given.get(name) is not None:
                given[name] = self.split(given[name])
        merged = {"class_weights": head.class_weights, **head.loss_options, **given}
        if merged.get("reduction", "mean") == "mean" and all(
            merged.get(name) is None for name in ("normalizer", "num_items_in_batch")
        ):
            given["normalizer"] = target_weight_sum(
                targets, merged["class_weights"], merged.get("ignore_index", -100), torch.float32
            )
        output = head(hidden, self.split(targets), **given)
        joined: list[Any] = [
            x if x is None else self.whole(x) if x.dim() else self.total(x) for x in output
        ]
        return output._make(joined)


def _whole(x: Tensor, shard: SequenceShard) -> Tensor:
    """Gather the chunks of all ranks in their order."""
    ranks, (batch, part, *rest) = shard.ranks, x.shape
    parts = x.new_empty(ranks * batch, part, *rest)
    if not x.is_meta:  # a simulation has one process
        all_gather(parts, x.contiguous(), group=shard.group)
    firsts, seconds = parts.view(ranks, batch, 2, part // 2, *rest).unbind(2)
    # (batch, chunk, tokens of a chunk, ...)
    chunks = torch.cat([firsts, seconds.flip(0)]).transpose(0, 1)
    return chunks.reshape(batch, ranks * part, *rest)


def _summed_part(grad: Tensor, shard: SequenceShard) -> Tensor:
    """Sum the gradients of all ranks in float32, and return this rank's chunks of them."""
    ranks, (batch, seq, *rest) = shard.ranks, grad.shape
    dtype = torch.promote_types(grad.dtype, torch.float32)
    firsts, seconds = grad.unflatten(1, (2, ranks, -1)).transpose(0, 2).unbind(1)
    parts = torch.stack([firsts, seconds.flip(0)], 2).to(dtype)
    out = parts.new_empty(batch, seq // ranks, *rest)
    if not grad.is_meta:
        reduce_scatter(out, parts.reshape(ranks * batch, -1, *rest), group=shard.group)
    return out.to(grad.dtype)
