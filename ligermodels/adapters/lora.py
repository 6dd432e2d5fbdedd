"""Low-rank adapters (LoRA, arXiv:2106.09685) on linears, also on packed ones; and DoRA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.kernels.dispatch import (
    cast,
    outputs_are_stored,
    refuse_double_backward,
    without_autocast,
)
from ligermodels.kernels.frozen_experts import Adapter, ExpertWeight
from ligermodels.layers.experts import expert_weight


class RowRange(NamedTuple):
    """Neighbouring rows of a weight, which are neighbouring outputs."""

    start: int
    size: int

    @property
    def slice(self) -> slice:
        """The same rows as a slice."""
        return slice(self.start, self.start + self.size)


class LoraLinear(nn.Module):
    """base(x) + alpha / rank * B A dropout(x), where only A and B are trained.

    A packed projection has several parts, which are rows of its weight. Each part that has an
    adapter has its own A and B, as if it were a separate linear. B is 0 at first, so that
    the adapter changes nothing.

    With DoRA (arXiv:2402.09353), each adapted row of the sum of weight and update is scaled to a
    trained length, which is at first that of the weight's row. As in the paper, its length before
    that counts as a constant.

    Args:
        base: the linear, or another module that computes one, from (..., in) to (..., out).
        parts: the rows of each part that has an adapter. By default, one part of all rows.
        experts: how many experts have rows in the base; each has as many of the parts.
        rank: the rows of each A.
        alpha: the scale of the update, times the rank. By default, twice the rank.
        dropout: the rate at which the adapter's inputs are dropped in training.
        dora: whether the lengths of the rows are trained.
        rslora: whether the scale is alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732).

    Attributes:
        lora_a: (parts * rank, in), the A of each part on top of each other; float32.
        lora_b: (rows of all parts, rank), the B of each part on top of each other; float32.
        lora_magnitude: (rows of all parts), DoRA's lengths of the rows, or None; float32.
    """

    def __init__(
        self,
        base: nn.Module,
        parts: Sequence[RowRange] | None = None,
        *,
        rank: int = 16,
        alpha: float | None = None,
        dropout: float = 0.0,
        experts: int = 1,
        dora: bool = False,
        rslora: bool = False,
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self.out_features: int = base.out_features  # type: ignore[assignment]
        self.parts = [RowRange(0, self.out_features)] if parts is None else [*parts]
        self.parts_of_expert = len(self.parts) // experts
        self.rank, self.dropout = rank, nn.Dropout(dropout)
        self.alpha = 2.0 * rank if alpha is None else alpha
        self.disable_adapters, self.rslora = False, rslora
        rows = sum(part.size for part in self.parts)
        self.lora_a = nn.Parameter(torch.empty(len(self.parts) * rank, self.in_features))
        self.lora_b = nn.Parameter(torch.empty(rows, rank))
        self.register_parameter("lora_magnitude", None)
        self.register_buffer("_squares", None, persistent=False)
        self.reset_parameters()
        if dora:
            weight = self._weight(torch.float32)
            self._squares = torch.cat([weight[p.slice].square().sum(1) for p in self.parts])
            self.lora_magnitude = nn.Parameter(self._squares.sqrt())

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw A as `nn.Linear` draws its weight, and set B to 0."""
        bound = 1 / math.sqrt(self.in_features)
        self.lora_a.uniform_(-bound, bound, generator=generator)
        self.lora_b.zero_()

    @property
    def scaling(self) -> float:
        """The factor by which the product B A is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) of the base, also of one in few bits."""
        base: Any = self.base_layer
        kept = base.dequantized(dtype) if hasattr(base, "dequantized") else base.weight.to(dtype)
        return kept.detach()  # type: ignore[no-any-return]

    def by_part(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return that of each part in a tensor (rows of all parts, ...)."""
        return x.split([part.size for part in self.parts])

    @torch.no_grad()
    def _lengths(self, dtype: torch.dtype) -> Tensor:
        """Return the lengths of the rows of weight and update, (rows of all parts).

        They come from products with A in this dtype, without a matrix of the weight's size.
        """
        with without_autocast(self.lora_b):
            products = (self._weight(dtype) @ self.lora_a.to(dtype).T).split(self.rank, 1)
            dots = [
                ((2 * product[rows.slice] + self.scaling * (b @ (a @ a.T))) * b).sum(1)
                for (rows, a, b), product in zip(self.factors(), products)
            ]
        return (self._squares + self.scaling * torch.cat(dots)).clamp_min(1e-30).sqrt()

    def _stretch(self, dtype: torch.dtype) -> Tensor:
        """Return by what share DoRA stretches each row, (out): 0 where there is no adapter."""
        found = self.lora_magnitude / self._lengths(dtype) - 1
        stretch = found.new_zeros(self.out_features)
        for part, values in zip(self.parts, self.by_part(found)):
            stretch[part.slice] = values
        return stretch.to(dtype)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapter on or off. Without it, the layer computes base(x)."""
        self.disable_adapters = not enabled

    def factors(
        self, a: Tensor | None = None, b: Tensor | None = None
    ) -> list[tuple[RowRange, Tensor, Tensor]]:
        """Return the rows, A (rank, in) and B (rows, rank) of each part.

        Args: a, b: what `lora_a` and `lora_b` are a rank's parts of, if they are.
        """
        each_a = (self.lora_a if a is None else a).split(self.rank)
        return [*zip(self.parts, each_a, self.by_part(self.lora_b if b is None else b))]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (..., out) for x (..., in)."""
        out: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return out
        x = self.dropout(cast(x, out.dtype))
        a, b = cast(self.lora_a, out.dtype), cast(self.lora_b, out.dtype)
        if self.lora_magnitude is None:
            if torch.compiler.is_compiling():
                out = out.clone()  # a linear with a bias is a view there, which nothing may change
            return _Add.apply(out, x, a, b, self.parts, self.scaling)
        # What DoRA does not stretch: the bias, and what dropout keeps from the adapter.
        bias = getattr(self.base_layer, "bias", None)
        rest = out.new_zeros(()) if bias is None else bias.to(out.dtype)
        plain = out - rest
        if self.training and self.dropout.p:
            plain = self.base_layer(x) - rest
            rest = out - plain
        total = _Add.apply(plain, x, a, b, self.parts, self.scaling)
        return rest + total + total * self._stretch(out.dtype)

    def expert_weight(self) -> ExpertWeight:
        """Return the weight of experts, whose rows are those of `base_layer`, and their adapters.

        The parts are those of the experts, in their order, and all experts have the same ones.
        """
        base = expert_weight(self.base_layer)
        if self.disable_adapters:
            return base
        parts = tuple((part.start, part.size) for part in self.parts[: self.parts_of_expert])
        adapter = Adapter(parts, self.scaling, self.dropout.p if self.training else 0.0)
        return base._replace(a=self.lora_a, b=self.lora_b, adapter=adapter)

    def extra_repr(self) -> str:
        """Return the text that `print` shows."""
        return f"rank={self.rank}, alpha={self.alpha:g}"


class _Add(torch.autograd.Function):
    """Add the update to the outputs of the base, in place, without a tensor of their size."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        parts: list[RowRange],
        scaling: float,
    ) -> Tensor:
        x_NI = x.flatten(0, -2)
        z_NR = x_NI @ a.T
        if outputs_are_stored():
            out = out.clone()
        else:
            ctx.mark_dirty(out)
        out_NO = out.view(-1, out.shape[-1])
        rank = b.shape[1]
        for z, b_part, rows in _split(z_NR, b, parts, rank):
            out_NO[:, rows.slice].addmm_(z, b_part.T, alpha=scaling)
        ctx.save_for_backward(x, z_NR, a, b)
        ctx.parts, ctx.scaling = parts, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_double_backward("LoraLinear")
        x, z_NR, a, b = ctx.saved_tensors
        rank = b.shape[1]
        grad_NO = grad.flatten(0, -2)
        dz_NR, db = torch.empty_like(z_NR), torch.empty_like(b)
        results = _split(dz_NR, db, ctx.parts, rank)
        for (z, b_part, rows), (dz, db_part, _) in zip(_split(z_NR, b, ctx.parts, rank), results):
            dy = grad_NO[:, rows.slice]
            dz.addmm_(dy, b_part, beta=0, alpha=ctx.scaling)
            db_part.addmm_(dy.T, z, beta=0, alpha=ctx.scaling)
        dx = (dz_NR @ a).view_as(x) if ctx.needs_input_grad[1] else None
        return grad, dx, dz_NR.T @ x.flatten(0, -2), db, None, None


def _split(
    z_NR: Tensor, b: Tensor, parts: list[RowRange], rank: int
) -> list[tuple[Tensor, Tensor, RowRange]]:
    """Return the columns of z, the rows of B, and the rows of the outputs of each part."""
    return [*zip(z_NR.split(rank, 1), b.split([part.size for part in parts]), parts)]
