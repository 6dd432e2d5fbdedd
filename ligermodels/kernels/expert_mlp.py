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
from ligermodels.kernels.frozen_experts import ExpertWeight, Projection

_OP = "expert_mlp"


class _ExpertMLP(torch.autograd.Function):
    """The stacks are the items of two `ExpertWeight`: that of gate and up, and that of down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        count: int,
        activation: str | ClampedSwiGLU,
        keep_gate_up: bool,
        *stacks: Any,
    ) -> Tensor:
        ops = ctx.ops = select(_OP, x)
        order, place, starts = select("routing", x).sort_by_expert(experts, count)
        first, second = (Projection(x, count, starts, *each) for each in (stacks[:6], stacks[6:]))
        owner = _owner(experts, count, gate_up_bias, down_bias)
        mask_1 = first.mask(x)
        bias = gate_up_bias, None if owner is None else owner.flatten()[order]
        gate_up, z_1, made = first.activated(x, mask_1, (order, place), bias, activation)
        kept = (gate_up, z_1) if keep_gate_up else (None, None)
        del gate_up, z_1
        mask_2 = second.mask(made)
        y, z_2 = second.forward(made, mask_2, None)
        ctx.save_for_backward(
            *(x, *kept, weights, order, place, starts, mask_1, z_2, mask_2),
            *(gate_up_bias, down_bias, owner, *stacks[:5], *stacks[6:11]),
        )
        ctx.adapters, ctx.activation, ctx.count = (stacks[5], stacks[11]), activation, count
        return ops.expert_sum(y, place, weights, down_bias, owner)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_OP)
        saved, ops, needs = ctx.saved_tensors, ctx.ops, ctx.needs_input_grad
        x, gate_up, z_1, weights, order, place, starts, mask_1, z_2, mask_2 = saved[:10]
        gate_up_bias, down_bias, owner = saved[10:13]
        stacks = (*saved[13:18], ctx.adapters[0]), (*saved[18:], ctx.adapters[1])
        first, second = (Projection(x, ctx.count, starts, *each) for each in stacks)
        grads: list[Tensor | None] = [None] * len(needs)  # of gate_up's a: 11, of down's: 17

        bias = gate_up_bias, None if owner is None else owner.flatten()[order]

        def summed(rows: Tensor) -> Tensor:
            return ops.expert_sum(rows, place, None, None, None)  # type: ignore[no-any-return]

        if gate_up is None:
            gate_up, z_1 = first.activated(x, mask_1, (order, place), bias, ctx.activation)[:2]
        grad_rows = ops.expert_rows(grad_output, place)
        grad_z = second.gradient_of_z(grad_rows)
        grad_gate_up, made, grad_weights = ops.expert_glu_backward(
            gate_up.detach(),
            *bias,
            second.gradient_of_inputs(grad_rows, grad_z, mask_2),
            weights,
            order,
            ctx.activation,
            nobody_reads_again(),
        )
        del gate_up
        if needs[1]:
            grads[1] = grad_weights
            if down_bias is not None:
                with without_autocast(grad_output):
                    of_bias = (grad_output @ down_bias.mT).gather(1, owner.long())
                grads[1] += of_bias
        if needs[14]:
            grads[14] = second.gradient_of_weight(grad_rows, made)
        if needs[17]:
            grads[17] = second.gradient_of_a(grad_z, second.dropped(made, mask_2))
        if needs[18]:
            weighted = z_2 * weights.flatten()[order][:, None]
            grads[18] = second.gradient_of_b(grad_rows, cast(weighted, z_2.dtype))
        if needs[4]:
            experts = torch.arange(first.count, dtype=torch.int32, device=x.device)
            share = ((owner[..., None] == experts) * weights[..., None]).sum(1)
            with without_autocast(grad_output):
                summed_rows = share.mT @ cast(grad_output, share.dtype)
            grads[4] = cast(summed_rows, down_bias.dtype)
        del made, grad_rows
        if needs[8]:
            grads[8] = first.gradient_of_weight(grad_gate_up, ops.expert_rows(x, place))
        if needs[3]:
            ones = grad_gate_up.new_ones(len(grad_gate_up), 1)
            grads[3] = ops.expert_linear_weight_gradient(grad_gate_up, ones, starts)[..., 0]
        grad_z = first.gradient_of_z(grad_gate_up)
        if needs[0]:  # the mask is one for all of a token's rows
            grads[0] = first.gradient_of_inputs(grad_gate_up, grad_z, mask_1, summed)
        if needs[11]:
            rows = ops.expert_rows(first.dropped(x, mask_1), place)
            grads[11] = first.gradient_of_a(grad_z, rows)
        if needs[12]:
            grads[12] = first.gradient_of_b(grad_gate_up, z_1)
        return tuple(grads)


def _owner(experts: Tensor, count: int, *biases: Tensor | None) -> Tensor | None:
    """Return the expert of each pair for biases: no kernel may read another one."""
    return None if all(x is None for x in biases) else experts.clamp(0, count - 1)


def _of_few(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    count: int,
    activation: str | ClampedSwiGLU,
    *stacks: ExpertWeight,
) -> Tensor:
    """Return what `_ExpertMLP` does, in the order of the pairs, without sorting them."""
    ops, owner = select(_OP, x), _owner(experts, count, gate_up_bias, down_bias)
    owner_of_row = None if owner is None else owner.flatten()
    first, second = (Projection(x, count, None, *stack) for stack in stacks)
    gate_up = first.few(x, experts)
    made = ops.expert_glu_forward(gate_up, gate_up_bias, owner_of_row, activation)
    return ops.expert_sum(  # type: ignore[no-any-return]
        second.few(made, experts.view(-1, 1)), None, weights, down_bias, owner
    )


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
    return adapted_expert_mlp(
        *(x, ExpertWeight(gate_up_weight), ExpertWeight(down_weight), weights, experts),
        len(down_weight),
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

    An adapter is two thin products: no weight of its size is ever made. Without gradients, few
    tokens convert only the experts that they have, in the tiles of the products. Backward keeps
    what that of `expert_mlp` keeps, and the thin results between the two products; with dropout
    also a byte for each input of an adapter, where those of gate and up are one for each token.

    Args:
        x, weights, experts, and the options: as in `expert_mlp`.
        gate_up, down: the weights of all experts and their adapters; count: the number of experts.
    Returns: (..., hidden) in x's dtype, or in that of autocast.
    Source: LoRA, arXiv:2106.09685.
    """
    x = cast(x, autocast_dtype(x) or x.dtype)
    biases = [None if each is None else each.to(x.dtype) for each in (gate_up_bias, down_bias)]
    rows, top_k = x.reshape(-1, x.shape[-1]), experts.shape[-1]
    experts = experts.reshape(-1, top_k).to(torch.int32).contiguous()
    routes = weights.reshape(-1, top_k), experts
    args: Any = (rows, *routes, *biases, count, activation)
    drops = any(each.adapter is not None and each.adapter.dropout for each in (gate_up, down))
    few = not torch.is_grad_enabled() and select(_OP, x).are_few(experts.numel(), count)
    if few and not drops:
        return _of_few(*args, gate_up, down).view(x.shape)
    return apply(_ExpertMLP, *args, keep_gate_up, *gate_up, *down).view(x.shape)  # type: ignore[no-any-return]
