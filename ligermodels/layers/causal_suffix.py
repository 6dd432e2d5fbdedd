"""Causal attention of the last tokens of rows to all tokens of the rows.

PyTorch's fastest kernels align the causal mask with the first key; these queries need it aligned
with the last key. So attention is computed twice: without a mask over the keys before the queries,
and with a causal mask over the queries' own keys. The two outputs are weighted by their sums of
exponentials, as blocks of keys are in arXiv:2205.14135. The backward of each part uses the output
and the log-sum-exp of the whole.
"""

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def causal_suffix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return (batch, heads, queries, head_dim); the queries are the last tokens of the keys.

    Args: q (batch, heads, queries, head_dim); k, v (batch, kv heads, keys, head_dim), more keys
        than queries; scale, the factor on the scores.
    """
    return _CausalSuffix.apply(q, k, v, scale)


class _CausalSuffix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        past = k.shape[2] - q.shape[2]
        before, lse_before, *state = _attend(q, k[:, :, :past], v[:, :, :past], False, scale)
        own, lse_own, *state_own = _attend(q, k[:, :, past:], v[:, :, past:], True, scale)
        # out = own + share * (before - own), in one float32 buffer
        share = torch.sigmoid(lse_before - lse_own)
        out = before.to(share.dtype).sub_(own).mul_(share).add_(own).to(q.dtype)
        lse = torch.logaddexp(lse_before, lse_own)
        ctx.save_for_backward(q, k, v, out, lse, *state, *state_own)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *states = ctx.saved_tensors
        past, half = k.shape[2] - q.shape[2], len(states) // 2
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dq = None
        for keys, causal, state in (
            (slice(past, None), True, states[half:]),
            (slice(0, past), False, states[:half]),
        ):
            more, dk[:, :, keys], dv[:, :, keys] = _attend_backward(
                grad, q, k[:, :, keys], v[:, :, keys], out, lse, causal, ctx.scale, state
            )
            dq = more if dq is None else dq + more
        return dq, dk, dv, None


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return the output, the log-sum-exp (batch, heads, queries, 1), and what backward needs."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse.unsqueeze(-1)
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse, seed, offset


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `_attend`."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.squeeze(-1), 0.0, causal, scale=scale
        )
    sizes = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, out, lse, *state, None, None, None, *sizes, 0.0, causal), scale=scale
    )
