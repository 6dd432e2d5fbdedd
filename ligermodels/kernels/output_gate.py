"""The gate on a layer's heads: x * act(gate), or rms_norm(x) * act(gate)."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_output_gate
from ligermodels.kernels.dispatch import apply, refuse_double_backward, select


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, activation: str, eps: float
    ) -> Tensor:
        ctx.ops, ctx.options = select("output_gate", x), (activation, eps)
        ctx.save_for_backward(x, gate, weight)
        return ctx.ops.output_gate_forward(x, gate, weight, activation, eps)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("output_gate")
        grads = ctx.ops.output_gate_backward(grad, *ctx.saved_tensors, *ctx.options, False)
        return *grads[:3], None, None


def output_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    activation: str = "sigmoid",
    eps: float = 1e-6,
) -> Tensor:
    """Return x * act(gate), or weight * x / sqrt(mean(x^2) + eps) * act(gate), in one launch.

    The mean is over the columns of a head. Backward computes it again.

    Args:
        x, gate: (batch, seq, heads, head_dim), of any strides.
        weight: (head_dim), of the norm; by default there is none.
        activation: "sigmoid", for attention (arXiv:2505.06708), or "silu", for linear attention.
        eps: of the norm.
    Returns: (batch, seq, heads, head_dim) in x's dtype, computed in float32 and rounded once.
    Raises: ValueError if shapes do not fit, a tensor is not floating point, or the activation is
        another one.
    Source: arXiv:2412.06464, section 3.4, for the norm with a gate.
    """
    check_output_gate("output_gate", x, gate, weight, activation)
    return apply(_OutputGate, x, gate, weight, activation, eps)  # type: ignore[no-any-return]
