"""The MLPs of frozen experts: weights of 16 or fewer bits, with low-rank adapters."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.dispatch import (
    apply,
    autocast_dtype,
    cast,
    nobody_reads_again,
    refuse_double_backward,
    select,
    without_autocast,
)

_OP = "frozen_experts"


class Adapter(NamedTuple):
    """What the update B A dropout(x) * scaling of every expert has in common.

    parts: the first row and the number of rows, among those of one expert, of each projection that
    has an adapter.
    """

    parts: tuple[tuple[int, int], ...]
    scaling: float
    dropout: float = 0.0


class ExpertWeight(NamedTuple):
    """The frozen weight of all experts, one after the other, and its adapters or None.

    weight: (experts * out, in) floating point, or codes as in `dequantize`: (experts * out, in)
    int8, or (experts * out, in / 2) uint8. scales: (experts * out, blocks) for codes. levels: (16,)
    for those of 4 bits. a: (experts * parts * rank, in), b: (experts * rows of the parts, rank).
    """

    weight: Tensor
    scales: Tensor | None = None
    levels: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    adapter: Adapter | None = None


class _FrozenExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        a_1: Tensor | None,
        b_1: Tensor | None,
        a_2: Tensor | None,
        b_2: Tensor | None,
        weight_1: Tensor,
        scales_1: Tensor | None,
        levels_1: Tensor | None,
        weight_2: Tensor,
        scales_2: Tensor | None,
        levels_2: Tensor | None,
        adapter_1: Adapter | None,
        adapter_2: Adapter | None,
        count: int,
        activation: str | ClampedSwiGLU,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        keep_gate_up: bool,
    ) -> Tensor:
        ops = ctx.ops = select("expert_mlp", x)
        order, place, starts = select("routing", x).sort_by_expert(experts, count)
        first = _Projection(x, starts, adapter_1, a_1, b_1, weight_1, scales_1, levels_1)
        second = _Projection(x, starts, adapter_2, a_2, b_2, weight_2, scales_2, levels_2)
        owner = owner_of_row = None
        if gate_up_bias is not None or down_bias is not None:
            owner = experts.clamp(0, count - 1)  # no kernel may read another bias
            owner_of_row = owner.flatten()[order]
        mask_1 = first.mask(x)
        gate_up, z_1 = first.forward(x, mask_1, place)
        made = ops.expert_glu_forward(gate_up, gate_up_bias, owner_of_row, activation)
        kept = (gate_up, z_1) if keep_gate_up else (None, None)
        del gate_up, z_1
        mask_2 = second.mask(made)
        y, z_2 = second.forward(made, mask_2, None)
        ctx.save_for_backward(
            *(x, *kept, weights, order, place, starts, mask_1, z_2, mask_2),
            *(a_1, b_1, weight_1, scales_1, levels_1, a_2, b_2, weight_2, scales_2, levels_2),
            *(gate_up_bias, down_bias, owner),
        )
        ctx.adapters, ctx.activation = (adapter_1, adapter_2), activation
        return ops.expert_sum(y, place, weights, down_bias, owner)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_OP)
        saved, ops = ctx.saved_tensors, ctx.ops
        x, gate_up, z_1, weights, order, place, starts, mask_1, z_2, mask_2 = saved[:10]
        first = _Projection(x, starts, ctx.adapters[0], *saved[10:15])
        second = _Projection(x, starts, ctx.adapters[1], *saved[15:20])
        gate_up_bias, down_bias, owner = saved[20:]
        needs_x, needs_weights, _, needs_a_1, needs_b_1, needs_a_2, needs_b_2 = (
            ctx.needs_input_grad[:7]
        )
        grads: list[Tensor | None] = [None] * 20
        if gate_up is None:
            gate_up, z_1 = first.forward(x, mask_1, place)
        grad_rows = ops.expert_rows(grad_output, place)
        grad_made = second.product(grad_rows, transposed=False)
        grad_z = None if second.adapter is None else second.to_rank(grad_rows)
        if grad_z is not None and mask_2 is None:
            second.add_to_inputs(grad_made, grad_z)
        elif grad_z is not None:
            grad_made += second.dropped(second.to_inputs(grad_z), mask_2)
        grad_gate_up, made, grad_weights = ops.expert_glu_backward(
            gate_up.detach(),
            gate_up_bias,
            None if owner is None else owner.flatten()[order],
            grad_made,
            weights,
            order,
            ctx.activation,
            nobody_reads_again(),
        )
        del gate_up, grad_made
        if needs_weights:
            grads[1] = grad_weights
            if down_bias is not None:
                with without_autocast(grad_output):
                    of_bias = (grad_output @ down_bias.mT).gather(1, owner.long())
                grads[1] += of_bias
        if needs_a_2:
            grads[5] = second.gradient_of_a(grad_z, second.dropped(made, mask_2))
        if needs_b_2:
            weighted = z_2 * weights.flatten()[order][:, None]
            grads[6] = second.gradient_of_b(grad_rows, cast(weighted, z_2.dtype))
        del made, grad_rows
        grad_z = None if first.adapter is None else first.to_rank(grad_gate_up)
        if needs_x:
            rows = first.product(grad_gate_up, transposed=False)
            if grad_z is not None and mask_1 is None:
                first.add_to_inputs(rows, grad_z)
            grad_x = ops.expert_sum(rows, place, None, None, None)
            del rows
            if grad_z is not None and mask_1 is not None:  # which is one for all of a token's rows
                dropped = ops.expert_sum(first.to_inputs(grad_z), place, None, None, None)
                grad_x += first.dropped(dropped, mask_1)
            grads[0] = grad_x
        if needs_a_1:
            grads[3] = first.gradient_of_a(grad_z, ops.expert_rows(first.dropped(x, mask_1), place))
        if needs_b_1:
            grads[4] = first.gradient_of_b(grad_gate_up, z_1)
        return tuple(grads)


class _Projection:
    """The products of all experts with their frozen weight and their adapters."""

    def __init__(
        self,
        x: Tensor,
        starts: Tensor,
        adapter: Adapter | None,
        a: Tensor | None,
        b: Tensor | None,
        weight: Tensor,
        scales: Tensor | None,
        levels: Tensor | None,
    ) -> None:
        self.ops, self.frozen_ops = select("expert_mlp", x), select(_OP, x)
        self.starts, self.count, self.adapter = starts, len(starts) - 1, adapter
        self.a, self.b, self.base = a, b, (weight, scales, levels)
        if adapter is not None:
            self.factors = self._factors(x.dtype)

    def mask(self, x: Tensor) -> Tensor | None:
        """Return what dropout keeps of the inputs of the adapters, or None if it keeps all."""
        if self.adapter is None or not self.adapter.dropout:
            return None
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.adapter.dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, place: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the rows of x, or of the tokens of x at their places, and A x."""
        rows = x if place is None else self.ops.expert_rows(x, place)
        out = self.product(rows, transposed=True)
        if self.adapter is None:
            return out, None
        if mask is not None:
            del rows
            dropped = self.dropped(x, mask)
            rows = dropped if place is None else self.ops.expert_rows(dropped, place)
        a, b = self.factors
        z = self.ops.expert_linear(rows, a.mT, self.starts)
        self.frozen_ops.expert_linear_add(out, z * self.adapter.scaling, b.mT, self.starts)
        return out, z

    def dropped(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return x as dropout leaves it, or its gradient for that of the result."""
        if mask is None or self.adapter is None:
            return x
        return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - self.adapter.dropout))  # type: ignore[no-any-return]

    def product(self, x: Tensor, *, transposed: bool) -> Tensor:
        """Multiply each row of x with its expert's weight."""
        weight, scales, levels = self.base
        if scales is None:
            stack = cast(weight, x.dtype).unflatten(0, (self.count, -1))
            stack = stack.mT if transposed else stack
            return self.ops.expert_linear(x, stack, self.starts)  # type: ignore[no-any-return]
        return self.frozen_ops.quantized_expert_linear(  # type: ignore[no-any-return]
            x, weight, scales, levels, self.starts, transposed
        )

    def to_rank(self, grad: Tensor) -> Tensor:
        """Return the gradient of A x."""
        assert self.adapter is not None
        _, b = self.factors
        z: Tensor = self.ops.expert_linear(grad, b, self.starts)
        return z.mul_(self.adapter.scaling)

    def to_inputs(self, grad_z: Tensor) -> Tensor:
        """Return the gradient of the inputs of A."""
        a, _ = self.factors
        return self.ops.expert_linear(grad_z, a, self.starts)  # type: ignore[no-any-return]

    def add_to_inputs(self, grad: Tensor, grad_z: Tensor) -> None:
        """Add the gradient of the inputs of A to that of the inputs of the frozen weight."""
        a, _ = self.factors
        self.frozen_ops.expert_linear_add(grad, grad_z, a, self.starts)

    def gradient_of_a(self, grad_z: Tensor | None, rows: Tensor) -> Tensor:
        """Return the gradient of A in its shape and dtype."""
        assert self.a is not None and grad_z is not None
        grad = self.ops.expert_linear_weight_gradient(grad_z, rows, self.starts)
        return cast(grad, self.a.dtype).view_as(self.a)

    def gradient_of_b(self, grad: Tensor, z: Tensor) -> Tensor:
        """Return the gradient of B in its shape and dtype. A x is z."""
        assert self.b is not None and self.adapter is not None
        whole = self.ops.expert_linear_weight_gradient(grad, z * self.adapter.scaling, self.starts)
        rank = self.b.shape[1]
        blocks = [
            whole[:, row : row + size, rank * i : rank * (i + 1)]
            for i, (row, size) in enumerate(self.adapter.parts)
        ]
        return cast(torch.cat(blocks, 1), self.b.dtype).view_as(self.b)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A (experts, parts * rank, in) and B (experts, out, parts * rank).

        Each projection of an expert has its own columns of B, and zeros in the others.
        """
        assert self.a is not None and self.b is not None and self.adapter is not None
        a, parts = cast(self.a, dtype).unflatten(0, (self.count, -1)), self.adapter.parts
        b, rank = cast(self.b, dtype).unflatten(0, (self.count, -1)), self.b.shape[1]
        out = len(self.base[0]) // self.count
        if parts == ((0, out),):
            return a, b
        whole = b.new_zeros(self.count, out, a.shape[1])
        for i, block in enumerate(b.split([size for _, size in parts], 1)):
            row, size = parts[i]
            whole[:, row : row + size, rank * i : rank * (i + 1)] = block
        return a, whole


def frozen_expert_mlp(
    x: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    weights: Tensor,
    experts: Tensor,
    count: int,
    activation: str | ClampedSwiGLU = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    keep_gate_up: bool = True,
) -> Tensor:
    """Return what `expert_mlp` returns, for frozen weights, of which only adapters have gradients.

    An adapter is two thin products: no weight of its size is ever made. Backward keeps what that of
    `expert_mlp` keeps, and the thin results between the two products; with dropout also a byte for
    each input of an adapter, where those of gate and up are one for each token.

    Args:
        x, weights, experts, and the options: as in `expert_mlp`.
        gate_up, down: the weights of all experts and their adapters; count: the number of experts.
    Returns: (..., hidden) in x's dtype, or in that of autocast.
    Raises: ValueError if a weight or bias requires a gradient, which would be left out.
    Source: LoRA, arXiv:2106.09685.
    """
    x = cast(x, autocast_dtype(x) or x.dtype)
    biases = [None if each is None else each.to(x.dtype) for each in (gate_up_bias, down_bias)]
    frozen = gate_up.weight, down.weight, *biases
    if any(each is not None and each.requires_grad for each in frozen):
        raise ValueError(
            "frozen_expert_mlp: a weight or bias of the experts requires a gradient; freeze it "
            "with requires_grad_(False), because only adapters are trained here"
        )
    top_k = experts.shape[-1]
    out = apply(
        _FrozenExpertMLP,
        x.reshape(-1, x.shape[-1]),
        weights.reshape(-1, top_k),
        experts.reshape(-1, top_k).to(torch.int32),
        *(gate_up.a, gate_up.b, down.a, down.b),
        *(*gate_up[:3], *down[:3], gate_up.adapter, down.adapter),
        count,
        activation,
        *biases,
        keep_gate_up,
    )
    return out.view(x.shape)
