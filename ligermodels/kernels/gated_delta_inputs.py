"""What the gated delta rule reads: convolved q, k and v, with q and k normalised, and the gates."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs, check_floating
from ligermodels.kernels.dispatch import apply, refuse_double_backward, select

_OP = "gated_delta_inputs"


class _GatedDeltaInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key_heads: int, key_dim: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ops = select(_OP, inputs[0])
        ctx.save_for_backward(*inputs)
        return ctx.ops.gated_delta_inputs_forward(DeltaInputs(*inputs), key_heads, key_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward(_OP)
        inputs = DeltaInputs(*ctx.saved_tensors)
        return None, None, *ctx.ops.gated_delta_inputs_backward(inputs, grads), None


def gated_delta_inputs(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_dim: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, g and beta for `gated_delta`, from the outputs of a layer's projections.

    q, k and v are silu(conv(qkv)), where each channel has its own causal convolution over the last
    tokens of its document. Each head of q and k is divided by sqrt(sum of squares + 1e-6).
    g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b). This is one launch, which
    computes in float32 and rounds once; backward computes it again.

    Args:
        qkv: (batch, seq, 2 * key_heads * key_dim + heads * dv), q first.
        b, a: (batch, seq, heads).
        weight: (channels, taps) of the convolution, the tap of the token itself last.
        a_log, dt_bias: (heads,).
        key_heads, key_dim: the heads of q and k, and their size.
        cu_seqlens: (documents + 1,) int32 or int64, where each document begins in all rows joined,
            and their end. By default each row is a document.
    Returns: q, k (batch, seq, key_heads, key_dim) and v (batch, seq, heads, dv) in qkv's dtype, g
        and beta (batch, seq, heads) in float32 (float64 for float64 inputs).
    Raises: ValueError if a shape does not fit.
    Source: arXiv:2412.06464.
    """
    inputs = join_inputs(_OP, (qkv, b, a, weight, a_log, dt_bias), key_heads, key_dim, cu_seqlens)
    made = apply(_GatedDeltaInputs, key_heads, key_dim, *inputs)
    q, k, v, g, beta = (x.unflatten(0, qkv.shape[:2]) for x in made)
    return q, k, v, g, beta


def row_starts(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return where each document begins, by default each row of x (batch, seq, ...), and the end.

    It is in int32, and counts the tokens of all rows joined.
    """
    if cu_seqlens is not None:
        return cu_seqlens.int()
    return torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32) * x.shape[1]


def join_inputs(
    op: str,
    tensors: tuple[Tensor, ...],
    key_heads: int,
    key_dim: int,
    cu_seqlens: Tensor | None,
) -> DeltaInputs:
    """Return the tensors of `gated_delta_inputs` with their rows joined.

    Raises: ValueError if they do not fit each other.
    """
    for name, tensor in zip(DeltaInputs._fields, tensors, strict=False):
        check_floating(op, name, tensor)
    qkv, b, a, weight, a_log, dt_bias = tensors
    keys, heads = key_heads * key_dim, len(a_log)
    fits = qkv.dim() == 3 and b.shape == a.shape == (*qkv.shape[:2], heads)
    fits = fits and a_log.shape == dt_bias.shape and weight.dim() == 2
    fits = fits and qkv.shape[-1] == len(weight) and len(weight) > 2 * keys
    if not fits or (len(weight) - 2 * keys) % heads:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(
            f"{op}: qkv, b, a, weight, a_log and dt_bias are {shapes}; expected (batch, seq, "
            "channels), (batch, seq, heads) twice, (channels, taps) and (heads,) twice, with "
            f"channels = 2 * {key_heads} * {key_dim} + a multiple of heads"
        )
    starts = row_starts(qkv, cu_seqlens)
    qkv, b, a = (x.flatten(0, 1) for x in (qkv, b, a))
    return DeltaInputs(qkv, b, a, weight, a_log, dt_bias, starts)
