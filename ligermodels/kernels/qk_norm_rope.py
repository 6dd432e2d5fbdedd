"""RMS norm of every query and key head, then rotary embedding, fused each way."""

import torch
from torch import Tensor

from ligermodels.kernels.checks import check_floating
from ligermodels.kernels.dispatch import refuse_double_backward, select
from ligermodels.kernels.rms_norm import check_norm
from ligermodels.kernels.rope import check_rope, split_qkv


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, heads, eps, offset, casting_mode):
        ctx.ops = select("qk_norm_rope", qkv)
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.options = eps, offset, casting_mode
        q, k, v = split_qkv(qkv, *heads)
        out = ctx.ops.qk_norm_rope_forward(
            q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode
        )
        return *out.split(heads, dim=-2), v

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        refuse_double_backward("qk_norm_rope")
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        q, k, _ = split_qkv(qkv, grad_q.shape[2], grad_k.shape[2])
        want_weights = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        grads = ctx.ops.qk_norm_rope_backward(
            grad_q, grad_k, grad_v, q, k, q_weight, k_weight, cos, sin, *ctx.options, want_weights
        )
        return *grads, *[None] * 6


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed qkv, normalise each head of q and k as `rms_norm` does, and rotate it.

    Between the two nothing is rounded but what casting_mode "llama" asks for. Only qkv is kept for
    backward.

    Args: qkv, cos, sin as in `rope`; q_weight, k_weight (head_dim); the rest as in `rms_norm`.
    Returns: q (batch, seq, heads, head_dim), k (batch, seq, kv heads, head_dim) in qkv's dtype,
        and v, a view of qkv, of k's shape.
    Raises: ValueError where shapes do not agree, or for an unknown casting_mode.
    Source: arXiv:2302.05442 (norms of queries and keys), arXiv:2104.09864.
    """
    op = "qk_norm_rope"
    check_floating(op, "qkv", qkv)
    heads = check_rope(op, qkv.shape, cos, sin, num_heads, num_kv_heads)
    q, k, _ = split_qkv(qkv, *heads)
    check_norm(op, q, q_weight, casting_mode, "q", "q_weight")
    check_norm(op, k, k_weight, casting_mode, "k", "k_weight")
    return _QKNormRope.apply(qkv, q_weight, k_weight, cos, sin, heads, eps, offset, casting_mode)
