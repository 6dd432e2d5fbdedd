"""The modules that tensor parallelism puts in the place of linears, norms and the embedding.

Each is a subclass of the module that it replaces and has parameters of the same names, so that
layers call it instead of fusing it, and names in a state dict stay. At the end of the file are the
exchanges of the sequence between the ranks of a group, with their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.kernels.linear_cross_entropy.vocab_shard import (
    all_gather,
    exchanged,
    reduce_scatter,
    sum_gradient,
)
from ligermodels.layers import LayerNorm, RMSNorm


class ColumnLinear(nn.Linear):
    """A linear whose outputs are split over ranks, and whose input is split along the sequence.

    `shared` (first row, rows, ranks): rows that so many neighbouring ranks have in common.
    """

    group: Any
    shared: tuple[int, int, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, outputs of this rank) for x (batch, seq / ranks, inputs)."""
        return _ColumnProduct.apply(x, self.weight, self.bias, self.group, self.shared)


class RowLinear(nn.Linear):
    """A linear whose inputs are split over ranks. Its output is split along the sequence."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq / ranks, outputs) for x (batch, seq, inputs of this rank)."""
        y = exchanged(F.linear(x, self.weight), scatter_sequence, gather_sequence, self.group)
        return y if self.bias is None else y + sum_gradient(self.bias, self.group)


class SequenceRMSNorm(RMSNorm):
    """An RMSNorm of this rank's part of the sequence. Its gradient is summed over the ranks.

    `gathers`: whether it returns the whole sequence.
    """

    group: Any
    gathers: bool

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or x + residual: see `RMSNorm`."""
        ops = kernels.rms_norm, kernels.add_rms_norm
        return _of_sequence(self, ops, x, residual, self.weight, **self.options)


class SequenceLayerNorm(LayerNorm):
    """A LayerNorm of this rank's part of the sequence; see `SequenceRMSNorm`."""

    group: Any
    gathers: bool

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x, or x + residual: see `LayerNorm`."""
        ops = kernels.layer_norm, kernels.add_layer_norm
        return _of_sequence(self, ops, x, residual, self.weight, self.bias, eps=self.eps)


def _of_sequence(
    norm: SequenceRMSNorm | SequenceLayerNorm,
    ops: tuple[Any, Any],
    x: Tensor,
    residual: Tensor | None,
    *parameters: Tensor | None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply the first op of a norm to x, or the second one to x and a residual."""
    alone, added = ops
    own = [None if p is None else sum_gradient(p, norm.group) for p in parameters]
    total = None
    if residual is None:
        y = alone(x, *own, **options)
    else:
        y, total = added(x, residual, *own, **options)
    if norm.gathers:  # for what all ranks compute alike: each takes its part of the gradient
        y = exchanged(y, gather_sequence, _own_part, norm.group)
    return y if total is None else (y, total)


def sequence_norm(
    norm: RMSNorm | LayerNorm, group: Any, *, gathers: bool = False
) -> SequenceRMSNorm | SequenceLayerNorm:
    """Return a norm of a part of the sequence, with the parameters and settings of `norm`."""
    made: SequenceRMSNorm | SequenceLayerNorm
    size = norm.normalized_shape[0]
    if isinstance(norm, RMSNorm):
        made = SequenceRMSNorm(size, **norm.options, device="meta")
    else:
        made = SequenceLayerNorm(size, norm.eps, device="meta")
        made.bias = norm.bias
    made.weight, made.group, made.gathers = norm.weight, group, gathers
    return made.train(norm.training)


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows. Its output is split along the sequence.

    Args:
        embedding: the whole embedding, whose settings and scale it takes.
        weight: (rows of this rank, hidden).
        first: the id of the first of these rows.
        group: the ranks that share the vocabulary.
    """

    def __init__(self, embedding: nn.Embedding, weight: nn.Parameter, first: int, group: Any):
        sizes = embedding.num_embeddings, embedding.embedding_dim
        super().__init__(*sizes, embedding.padding_idx, device="meta")
        self.weight, self.first, self.group = weight, first, group
        self.scale: float | None = getattr(embedding, "scale", None)

    def forward(self, input: Tensor) -> Tensor:
        """Look up (batch, seq) int64 and return (batch, seq / ranks, hidden)."""
        here = input - self.first
        mine = (here >= 0) & (here < len(self.weight))
        # On a GPU, the lookup of an id outside the whole vocabulary must fail, as in nn.Embedding.
        outside = (input < 0) | (input >= self.num_embeddings)
        rows = F.embedding(torch.where(mine, here, outside * len(self.weight)), self.weight)
        if self.padding_idx is not None:
            # The padding token's embedding gets no gradient, as in nn.Embedding.
            trained = (mine & (input != self.padding_idx)).unsqueeze(-1)
            rows = torch.where(trained, rows, rows.detach())
        rows = rows.masked_fill(~mine.unsqueeze(-1), 0.0)
        rows = exchanged(rows, scatter_sequence, gather_sequence, self.group)
        if self.scale is None:
            return rows
        return rows * torch.full((), self.scale, dtype=rows.dtype, device=rows.device)


class _ColumnProduct(torch.autograd.Function):
    """Gather the sequence and multiply. It saves this rank's part, and gathers it again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Any,
        shared: tuple[int, int, int] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.shared = group, shared
        return F.linear(gather_sequence(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = scatter_sequence(grad @ weight, ctx.group)
        rows = grad.flatten(0, -2)
        if needs_weight:
            grad_weight = rows.t() @ gather_sequence(x, ctx.group).flatten(0, -2)
            _sum_shared(grad_weight, ctx.shared, ctx.group)
        if needs_bias:
            grad_bias = rows.sum(0)
            _sum_shared(grad_bias, ctx.shared, ctx.group)
        return grad_x, grad_weight, grad_bias, None, None


def _sum_shared(grad: Tensor, shared: tuple[int, int, int] | None, group: Any) -> None:
    """Sum the gradient of rows that neighbouring ranks have in common, in place."""
    if shared is None:
        return
    first, rows, ranks = shared
    own = grad[first : first + rows].contiguous()
    every = own.new_empty(dist.get_world_size(group) * rows, *own.shape[1:])
    all_gather(every, own, group=group)
    start = dist.get_rank(group) // ranks * ranks
    same = every.view(-1, *own.shape)[start : start + ranks]
    grad[first : first + rows] = same.sum(0)


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """Return (..., seq, width) from each rank's (..., seq / ranks, width)."""
    out = x.new_empty(dist.get_world_size(group), *x.shape)
    all_gather(out.flatten(0, 1), x.contiguous(), group=group)
    return out.movedim(0, -3).flatten(-3, -2)


def scatter_sequence(x: Tensor, group: Any) -> Tensor:
    """Sum (..., seq, width) over ranks; return this rank's (..., seq / ranks, width)."""
    parts = x.unflatten(-2, (dist.get_world_size(group), -1)).movedim(-3, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    reduce_scatter(out, parts.flatten(0, 1), group=group)
    return out


def _own_part(grad: Tensor, group: Any) -> Tensor:
    return grad.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
