"""The MLPs of a mixture of experts: grouped products, and the sum over each token's experts."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import ClampedSwiGLU, check_expert_mlp
from ligermodels.kernels.dispatch import (
    apply,
    autocast_dtype,
    cast,
    nobody_reads_again,
    refuse_double_backward,
    select,
    without_autocast,
)
from ligermodels.kernels.frozen_experts import Adapter, ExpertWeight, Projection

_OP = "expert_mlp"


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        weight_1: Tensor,
        a_1: Tensor | None,
        b_1: Tensor | None,
        weight_2: Tensor,
        a_2: Tensor | None,
        b_2: Tensor | None,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        scales_1: Tensor | None,
        levels_1: Tensor | None,
        scales_2: Tensor | None,
        levels_2: Tensor | None,
        adapter_1: Adapter | None,
        adapter_2: Adapter | None,
        count: int,
        activation: str | ClampedSwiGLU,
        keep_gate_up: bool,
    ) -> Tensor:
        ops = ctx.ops = select(_OP, x)
        order, place, starts = select("routing", x).sort_by_expert(experts, count)
        base_1, base_2 = (weight_1, scales_1, levels_1), (weight_2, scales_2, levels_2)
        first = Projection(x, starts, adapter_1, a_1, b_1, *base_1)
        second = Projection(x, starts, adapter_2, a_2, b_2, *base_2)
        owner = _owner(experts, count, gate_up_bias, down_bias)
        mask_1 = first.mask(x)
        gate_up, z_1 = first.forward(x, mask_1, place)
        owner_of_row = None if owner is None else owner.flatten()[order]
        made = ops.expert_glu_forward(gate_up, gate_up_bias, owner_of_row, activation)
        kept = (gate_up, z_1) if keep_gate_up else (None, None)
        del gate_up, z_1
        mask_2 = second.mask(made)
        y, z_2 = second.forward(made, mask_2, None)
        ctx.save_for_backward(
            *(x, *kept, weights, order, place, starts, mask_1, z_2, mask_2),
            *(a_1, b_1, *base_1, a_2, b_2, *base_2, gate_up_bias, down_bias, owner),
        )
        ctx.adapters, ctx.activation = (adapter_1, adapter_2), activation
        return ops.expert_sum(y, place, weights, down_bias, owner)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_OP)
        saved, ops, needs = ctx.saved_tensors, ctx.ops, ctx.needs_input_grad
        x, gate_up, z_1, weights, order, place, starts, mask_1, z_2, mask_2 = saved[:10]
        first = Projection(x, starts, ctx.adapters[0], *saved[10:15])
        second = Projection(x, starts, ctx.adapters[1], *saved[15:20])
        gate_up_bias, down_bias, owner = saved[20:]
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
        if needs[1]:
            grads[1] = grad_weights
            if down_bias is not None:
                with without_autocast(grad_output):
                    of_bias = (grad_output @ down_bias.mT).gather(1, owner.long())
                grads[1] += of_bias
        if needs[6]:
            grads[6] = second.gradient_of_weight(grad_rows, made)
        if needs[7]:
            grads[7] = second.gradient_of_a(grad_z, second.dropped(made, mask_2))
        if needs[8]:
            weighted = z_2 * weights.flatten()[order][:, None]
            grads[8] = second.gradient_of_b(grad_rows, cast(weighted, z_2.dtype))
        if needs[10]:
            grads[10] = ops.expert_bias_gradient(grad_rows, starts, weights, order)
        del made, grad_rows
        if needs[3]:
            grads[3] = first.gradient_of_weight(grad_gate_up, ops.expert_rows(x, place))
        if needs[9]:
            grads[9] = ops.expert_bias_gradient(grad_gate_up, starts, None, order)
        grad_z = None if first.adapter is None else first.to_rank(grad_gate_up)
        if needs[0]:
            rows = first.product(grad_gate_up, transposed=False)
            if grad_z is not None and mask_1 is None:
                first.add_to_inputs(rows, grad_z)
            grad_x = ops.expert_sum(rows, place, None, None, None)
            del rows
            if grad_z is not None and mask_1 is not None:  # which is one for all of a token's rows
                dropped = ops.expert_sum(first.to_inputs(grad_z), place, None, None, None)
                grad_x += first.dropped(dropped, mask_1)
            grads[0] = grad_x
        if needs[4]:
            grads[4] = first.gradient_of_a(grad_z, ops.expert_rows(first.dropped(x, mask_1), place))
        if needs[5]:
            grads[5] = first.gradient_of_b(grad_gate_up, z_1)
        return tuple(grads)


def _owner(experts: Tensor, count: int, *biases: Tensor | None) -> Tensor | None:
    """Return the expert of each pair for biases: no kernel may read another one."""
    return None if all(x is None for x in biases) else experts.clamp(0, count - 1)


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
    ops, owner = select(_OP, x), _owner(experts, len(down_weight), gate_up_bias, down_bias)
    owner_of_row = None if owner is None else owner.flatten()
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
    count, top_k = len(down_weight), experts.shape[-1]
    if not torch.is_grad_enabled() and select(_OP, x).are_few(experts.numel(), count):
        rows, flat = x.reshape(-1, x.shape[-1]), experts.reshape(-1, top_k).to(torch.int32)
        stacks = gate_up_weight, down_weight, weights.reshape(-1, top_k)
        return _of_few(rows, *stacks, flat, activation, *biases).view(x.shape)
    return adapted_expert_mlp(
        *(x, ExpertWeight(gate_up_weight), ExpertWeight(down_weight), weights, experts, count),
        activation,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        keep_gate_up=keep_gate_up,
    )


def adapted_expert_mlp(
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
    """Return what `expert_mlp` returns, for weights that may be of few bits or have adapters.

    An adapter is two thin products: no weight of its size is ever made. Backward keeps what that of
    `expert_mlp` keeps, and the thin results between the two products; with dropout also a byte for
    each input of an adapter, where those of gate and up are one for each token.

    Args:
        x, weights, experts, and the options: as in `expert_mlp`.
        gate_up, down: the weights of all experts and their adapters; count: the number of experts.
    Returns: (..., hidden) in x's dtype, or in that of autocast.
    Source: LoRA, arXiv:2106.09685.
    """
    x = cast(x, autocast_dtype(x) or x.dtype)
    biases = [None if each is None else each.to(x.dtype) for each in (gate_up_bias, down_bias)]
    rows, top_k = x.reshape(-1, x.shape[-1]), experts.shape[-1]
    routes = weights.reshape(-1, top_k), experts.reshape(-1, top_k).to(torch.int32)
    out = apply(
        _ExpertMLP,
        *(rows, *routes, gate_up.weight, gate_up.a, gate_up.b, down.weight, down.a, down.b),
        *(*biases, *gate_up[1:3], *down[1:3], gate_up.adapter, down.adapter),
        *(count, activation, keep_gate_up),
    )
    return out.view(x.shape)
