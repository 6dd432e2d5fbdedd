"""Weights of experts, also of few bits and with low-rank adapters, and the products with them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import cast, select


class Adapter(NamedTuple):
    """What the update B A dropout(x) * scaling of every expert has in common.

    parts: the first row and the number of rows, among those of one expert, of each projection that
    has an adapter.
    """

    parts: tuple[tuple[int, int], ...]
    scaling: float
    dropout: float = 0.0


class ExpertWeight(NamedTuple):
    """The weight of all experts, one after the other, and its adapters or None.

    weight: (experts * out, in) or (experts, out, in) floating point, or codes as in `dequantize`:
    (experts * out, in) int8, or (experts * out, in / 2) uint8. scales: (experts * out, blocks) for
    codes. levels: (16,) for those of 4 bits, which are NF4. a: (experts * parts * rank, in), b:
    (experts * rows of the parts, rank).
    """

    weight: Tensor
    scales: Tensor | None = None
    levels: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    adapter: Adapter | None = None


class Projection:
    """The products of all experts with their weight and their adapters."""

    def __init__(
        self,
        x: Tensor,
        count: int,
        starts: Tensor | None,
        weight: Tensor,
        scales: Tensor | None,
        levels: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        adapter: Adapter | None,
    ) -> None:
        self.ops, self.frozen_ops = select("expert_mlp", x), select("frozen_experts", x)
        self.starts, self.count, self.adapter = starts, count, adapter
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

    def activated(
        self, x: Tensor, mask: Tensor | None, rows: Any, bias: tuple[Any, Any], activation: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return gate and up of the tokens of x, A x, and the activations.

        Args: as in `reference.expert_gate_up`; mask: see `mask`.
        """
        if self.adapter is None and self.base[1] is None:
            stack = self._stack(self.base[0], x).mT
            gate_up, made = self.ops.expert_gate_up(x, rows, stack, self.starts, bias, activation)
            return gate_up, None, made
        gate_up, z = self.forward(x, mask, rows[1])
        return gate_up, z, self.ops.expert_glu_forward(gate_up, *bias, activation)

    def few(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return the outputs of the pairs of a row of x and its experts, in their order."""
        weight, scales, levels = self.base
        if scales is None:
            out = self.ops.expert_linear_few(x, self._stack(weight, x).mT, experts)
        else:
            out = self.frozen_ops.quantized_expert_linear_few(
                x, weight, scales, levels, experts, self.count
            )
        if self.adapter is not None:
            a, b = self.factors
            z = self.ops.expert_linear_few(x, a.mT, experts) * self.adapter.scaling
            out += self.ops.expert_linear_few(z, b.mT, experts.view(-1, 1))
        return out  # type: ignore[no-any-return]

    def dropped(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return x as dropout leaves it, or its gradient for that of the result."""
        if mask is None or self.adapter is None:
            return x
        return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - self.adapter.dropout))  # type: ignore[no-any-return]

    def product(self, x: Tensor, *, transposed: bool) -> Tensor:
        """Multiply each row of x with its expert's weight."""
        weight, scales, levels = self.base
        if scales is None:
            stack = self._stack(weight, x)
            stack = stack.mT if transposed else stack
            return self.ops.expert_linear(x, stack, self.starts)  # type: ignore[no-any-return]
        return self.frozen_ops.quantized_expert_linear(  # type: ignore[no-any-return]
            x, weight, scales, levels, self.starts, transposed
        )

    def gradient_of_z(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of A x for that of the outputs, or None without adapters."""
        if self.adapter is None:
            return None
        z: Tensor = self.ops.expert_linear(grad, self.factors[1], self.starts)
        return z.mul_(self.adapter.scaling)

    def gradient_of_inputs(
        self,
        grad: Tensor,
        grad_z: Tensor | None,
        mask: Tensor | None,
        summed: Callable[[Tensor], Tensor] = lambda rows: rows,
    ) -> Tensor:
        """Return the gradient of the inputs, of which `summed` adds up those that are one token's.

        Args: grad, grad_z: the gradients of the outputs and of A x; mask: see `mask`.
        """
        rows = self.product(grad, transposed=False)
        if grad_z is None:
            return summed(rows)
        a, _ = self.factors
        if mask is None:
            self.frozen_ops.expert_linear_add(rows, grad_z, a, self.starts)
            return summed(rows)
        total = summed(rows)
        del rows
        total += self.dropped(summed(self.ops.expert_linear(grad_z, a, self.starts)), mask)
        return total

    def gradient_of_weight(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of the weight in its shape and dtype."""
        weight = self.base[0]
        made = self.ops.expert_linear_weight_gradient(grad, rows, self.starts)
        return cast(made, weight.dtype).view_as(weight)

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

    def _stack(self, weight: Tensor, x: Tensor) -> Tensor:
        stack = cast(weight, x.dtype)
        return stack if stack.dim() == 3 else stack.unflatten(0, (self.count, -1))

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
