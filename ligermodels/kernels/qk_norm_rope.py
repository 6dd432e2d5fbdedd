"""RMS norm of each query and key head, then rotary embedding: fused in forward and backward."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import NormOptions, check_floating, check_rms_norm, check_rope
from ligermodels.kernels.dispatch import apply, refuse_double_backward, select
from ligermodels.kernels.rope import split_qkv


def split_gated_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the views q, k, v of `split_qkv` and gate, of q's shape, which follows each head."""
    pairs, k, v = split_qkv(qkv, 2 * num_heads, num_kv_heads)
    q, gate = pairs.unflatten(-2, (num_heads, 2)).unbind(-2)
    return q, k, v, gate


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        options: NormOptions,
        gated: bool,
    ) -> tuple[Tensor, ...]:
        ctx.ops = select("qk_norm_rope", qkv)
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.options, ctx.split = options, split_gated_qkv if gated else split_qkv
        q, k, *others = ctx.split(qkv, *heads)
        turned = ctx.ops.qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, options)
        return *turned.split(heads, dim=-2), *others

    @staticmethod
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, grad_gate: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("qk_norm_rope")
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        q, k, *_ = ctx.split(qkv, grad_q.shape[2], grad_k.shape[2])
        needs_weight_grads = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        inputs = q, k, q_weight, k_weight, cos, sin
        grads = ctx.ops.qk_norm_rope_backward(
            grad_q, grad_k, grad_v, grad_gate, *inputs, ctx.options, needs_weight_grads
        )
        return *grads, *[None] * 5


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    gated: bool = False,
) -> tuple[Tensor, ...]:
    """Split packed qkv, normalise each head of q and k as `rms_norm` does, and rotate it.

    The normalised heads stay in float32, except for the rounding of casting_mode "llama". Forward
    saves only qkv for backward.

    Args: q_weight, k_weight: (head_dim); for the other arguments see `rope` and `rms_norm`. Pairs
        are half of what is rotated apart; gated: whether each head of q is followed by one of a
        gate (Qwen3-Next), so that qkv has as many columns more as q.
    Returns: q (batch, seq, heads, head_dim), k (batch, seq, kv heads, head_dim) in qkv's dtype,
        and v, a view of qkv with k's shape; with `gated`, also the gate, a view with q's shape.
    Raises: ValueError if shapes do not fit, heads have an odd size, a tensor is not floating point,
        or casting_mode is unknown.
    Source: arXiv:2302.05442 (norms of queries and keys), arXiv:2104.09864.
    """
    op = "qk_norm_rope"
    check_floating(op, "qkv", qkv)
    width = 2 if gated else 1
    all_heads, kv_heads = check_rope(op, qkv.shape, cos, sin, width * num_heads, num_kv_heads)
    heads = all_heads // width, kv_heads
    q, k, *_ = (split_gated_qkv if gated else split_qkv)(qkv, *heads)
    if q.shape[-1] % 2:
        raise ValueError(f"{op}: heads have {q.shape[-1]} elements; expected an even number")
    check_rms_norm(op, q, q_weight, casting_mode, "q", "q_weight")
    check_rms_norm(op, k, k_weight, casting_mode, "k", "k_weight")
    options = NormOptions(eps, offset, casting_mode)
    return apply(_QKNormRope, qkv, q_weight, k_weight, cos, sin, heads, options, gated)
