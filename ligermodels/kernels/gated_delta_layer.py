"""The gated delta rule with its inputs, which keeps only the outputs of the projections."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs, DeltaRule
from ligermodels.kernels.dispatch import apply, autocast_dtype, refuse_double_backward, select
from ligermodels.kernels.gated_delta_inputs import join_inputs


class _GatedDeltaLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key_heads: int, key_dim: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.ops = select("gated_delta_inputs", inputs[0]), select("gated_delta", inputs[0])
        ctx.sizes = key_heads, key_dim
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        made = ctx.ops[0].gated_delta_inputs_forward(DeltaInputs(*inputs), key_heads, key_dim)
        rule = DeltaRule(*(*made, inputs[-1], None))
        return ctx.ops[1].gated_delta_forward(rule, key_dim**-0.5)  # type: ignore[no-any-return]

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("gated_delta_layer")
        inputs, scale = DeltaInputs(*ctx.saved_tensors), ctx.sizes[1] ** -0.5
        made = ctx.ops[0].gated_delta_inputs_forward(inputs, *ctx.sizes)
        grad_out = torch.zeros_like(made[2]) if grad_out is None else grad_out
        rule = DeltaRule(*(*made, inputs.cu_seqlens, None))
        grads = ctx.ops[1].gated_delta_backward(rule, scale, grad_out, grad_final)
        del made, rule
        return None, None, *ctx.ops[0].gated_delta_inputs_backward(inputs, grads[:5]), None


def gated_delta_layer(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_dim: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `gated_delta` of `gated_delta_inputs`; save only the arguments for backward.

    Backward computes q, k, v and the gates again, which is one launch.

    Args: as in `gated_delta_inputs`. Under autocast, qkv is cast.
    Returns: (batch, seq, heads, dv) in qkv's dtype, and the state after each document, (documents,
        heads, key_dim, dv) in float32 (float64 for float64 inputs).
    Raises: ValueError as these two.
    """
    dtype = autocast_dtype(qkv)
    qkv = qkv if dtype is None else qkv.to(dtype)
    tensors = qkv, b, a, weight, a_log, dt_bias
    inputs = join_inputs("gated_delta_layer", tensors, key_heads, key_dim, cu_seqlens)
    out, state = apply(_GatedDeltaLayer, key_heads, key_dim, *inputs)
    return out.unflatten(0, qkv.shape[:2]), state
