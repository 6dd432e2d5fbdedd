"""The MLPs of a mixture of experts: grouped products, and the sum over each token's experts."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import ClampedSwiGLU, check_expert_mlp
from ligermodels.kernels.dispatch import (
    apply,
    autocast_dtype,
    nobody_reads_again,
    refuse_double_backward,
    select,
    without_autocast,
)

_OP = "expert_mlp"


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        weights: Tensor,
        experts: Tensor,
        activation: str | ClampedSwiGLU,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        keep_gate_up: bool,
    ) -> Tensor:
        ops = ctx.ops = select(_OP, x)
        order, place, starts = select("routing", x).sort_by_expert(experts, len(down_weight))
        owner = owner_of_row = None
        if gate_up_bias is not None or down_bias is not None:
            owner = experts.clamp(0, len(down_weight) - 1)  # no kernel may read another bias
            owner_of_row = owner.flatten()[order]
        gate_up = ops.expert_linear(ops.expert_rows(x, place), gate_up_weight.mT, starts)
        made = ops.expert_glu_forward(gate_up, gate_up_bias, owner_of_row, activation)
        ctx.save_for_backward(
            x,
            gate_up_weight,
            down_weight,
            weights,
            gate_up if keep_gate_up else None,
            order,
            place,
            starts,
            gate_up_bias,
            down_bias,
            owner,
        )
        ctx.activation = activation
        del gate_up
        y = ops.expert_linear(made, down_weight.mT, starts)
        return ops.expert_sum(y, place, weights, down_bias, owner)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_OP)
        x, gate_up_weight, down_weight, weights, gate_up, *rest = ctx.saved_tensors
        order, place, starts, gate_up_bias, down_bias, owner = rest
        needs_x, needs_gate_up, needs_down, needs_weights = ctx.needs_input_grad[:4]
        needs_gate_up_bias, needs_down_bias = ctx.needs_input_grad[6:8]
        ops = ctx.ops
        grads: list[Tensor | None] = [None] * 9
        if gate_up is None:
            gate_up = ops.expert_linear(ops.expert_rows(x, place), gate_up_weight.mT, starts)
        grad_rows = ops.expert_rows(grad_output, place)
        grad_made = ops.expert_linear(grad_rows, down_weight, starts)
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
            grads[3] = grad_weights
            if down_bias is not None:
                with without_autocast(grad_output):
                    of_bias = (grad_output @ down_bias.mT).gather(1, owner.long())
                grads[3] += of_bias
        if needs_down_bias:
            grads[7] = ops.expert_bias_gradient(grad_rows, starts, weights, order)
        if needs_down:
            grads[2] = ops.expert_linear_weight_gradient(grad_rows, made, starts)
        del grad_rows, made
        if needs_gate_up:
            rows = ops.expert_rows(x, place)
            grads[1] = ops.expert_linear_weight_gradient(grad_gate_up, rows, starts)
            del rows
        if needs_gate_up_bias:
            grads[6] = ops.expert_bias_gradient(grad_gate_up, starts, None, order)
        if needs_x:
            rows = ops.expert_linear(grad_gate_up, gate_up_weight, starts)
            grads[0] = ops.expert_sum(rows, place, None, None, None)
        return tuple(grads)


def _of_few(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str | ClampedSwiGLU,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Return what `_ExpertMLP` does, in the order of the pairs, without sorting them."""
    ops, owner, owner_of_row = select(_OP, x), None, None
    if gate_up_bias is not None or down_bias is not None:
        owner = experts.clamp(0, len(down_weight) - 1)
        owner_of_row = owner.flatten()
    gate_up = ops.expert_linear_few(x, gate_up_weight.mT, experts)
    made = ops.expert_glu_forward(gate_up, gate_up_bias, owner_of_row, activation)
    y = ops.expert_linear_few(made, down_weight.mT, experts.view(-1, 1))
    return ops.expert_sum(y, None, weights, down_bias, owner)


def expert_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str | ClampedSwiGLU = "silu",
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    keep_gate_up: bool = True,
) -> Tensor:
    """Return each token's weighted sum of the gated MLPs of its experts.

    Backward keeps x, gate and up of each pair of a token and an expert, and the order of the pairs:
    as much as a dense MLP with as many active parameters. Every sum has a fixed order, and the host
    never waits for a GPU. Without gradients, few tokens read the weights of their experts alone.

    Args:
        x: (..., hidden).
        gate_up_weight: (experts, 2 * inner, hidden), the gate's rows first, in x's dtype. Under
            autocast, these, the biases and x are cast.
        down_weight: (experts, hidden, inner).
        weights: (..., top_k) floating point, the weight of each chosen expert.
        experts: (..., top_k) int32 or int64, each token's experts. Those of `routing` differ;
            one that is named twice counts twice. A number that is no expert's is an error on a CPU
            in eager mode, and makes the results of its token undefined on a GPU.
        activation: of the gate: "silu", "gelu_tanh" or "gelu"; or a `ClampedSwiGLU`.
        gate_up_bias: (experts, 2 * inner), added before the activation, or None.
        down_bias: (experts, hidden), added before the weighting, or None.
        keep_gate_up: whether gate and up are kept for backward; otherwise it computes them again.
    Returns: (..., hidden) in x's dtype. The products are rounded once each, and their sum once.
    Raises: ValueError if the shapes, dtypes or the activation are wrong.
    Source: arXiv:2101.03961, with the gated MLP of arXiv:2002.05202.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, gate_up_weight, down_weight = (t.to(dtype) for t in (x, gate_up_weight, down_weight))
        gate_up_bias, down_bias = (
            None if bias is None else bias.to(dtype) for bias in (gate_up_bias, down_bias)
        )
    biases = gate_up_bias, down_bias
    check_expert_mlp(_OP, x, gate_up_weight, down_weight, weights, experts, activation, *biases)
    rows, top_k = x.reshape(-1, x.shape[-1]), experts.shape[-1]
    weights, experts = weights.reshape(-1, top_k), experts.reshape(-1, top_k).to(torch.int32)
    few = select(_OP, x).are_few(experts.numel(), len(down_weight))
    if few and not torch.is_grad_enabled():
        out = _of_few(rows, gate_up_weight, down_weight, weights, experts, activation, *biases)
        return out.view(x.shape)
    options = activation, *biases, keep_gate_up
    out = apply(_ExpertMLP, rows, gate_up_weight, down_weight, weights, experts, *options)
    return out.view(x.shape)
