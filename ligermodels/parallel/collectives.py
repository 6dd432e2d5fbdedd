"""Exchanges of the sequence between the ranks of a tensor-parallel group, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.kernels.linear_cross_entropy.vocab_shard import all_gather, reduce_scatter


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """Return (batch, seq, width) from each rank's (batch, seq / ranks, width).

    The batch may be missing: tiles of an MLP have none.
    """
    if x.dim() == 2:
        return gather_sequence(x.unsqueeze(0), group)[0]
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    if x.shape[0] == 1:
        return out.view(1, -1, *x.shape[2:])
    return out.view(ranks, *x.shape).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, group: Any) -> Tensor:
    """Sum (batch, seq, width) over ranks; return this rank's (batch, seq / ranks, width)."""
    if x.dim() == 2:
        return scatter_sequence(x.unsqueeze(0), group)[0]
    ranks = dist.get_world_size(group)
    batch, seq = x.shape[:2]
    parts = x.unflatten(1, (ranks, seq // ranks)).transpose(0, 1).contiguous()
    out = x.new_empty(batch, seq // ranks, *x.shape[2:])
    reduce_scatter(out, parts.flatten(0, 1), group=group)
    return out


class ScatterSequence(torch.autograd.Function):
    """Sum over the ranks, and keep this rank's part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_sequence(grad, ctx.group), None


class GatherSequence(torch.autograd.Function):
    """Gather the sequence for what all ranks compute alike: each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ranks, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(ranks, 1)[rank], None
