"""A layer's gated delta rule for few new tokens of each row; it overwrites the layer's state."""

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import select


def gated_delta_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    rows: Tensor,
    memory: Tensor,
    key_heads: int,
    key_dim: int,
    eps: float = 1e-6,
) -> Tensor:
    """Return what `gated_delta_inputs`, `gated_delta` and `output_gate` make of the next tokens.

    It overwrites rows and memory with the state after them, in two launches, which a CUDA graph can
    hold. It computes token by token and has no gradient.

    Args:
        qkv, b, a, weight, a_log, dt_bias, key_heads, key_dim: as in `gated_delta_inputs`.
        z: (batch, seq, heads * dv), the gate of the output.
        norm_weight, eps: of the norm of the output, (dv,).
        rows: (batch, taps - 1, channels), the last rows of qkv before these; contiguous.
        memory: (batch, heads, key_dim, dv), the state before these tokens, float32 (float64 for
            float64 inputs); contiguous.
    Returns: (batch, seq, heads * dv) in qkv's dtype.
    Raises: ValueError if a shape or the dtype of a state does not fit.
    Source: arXiv:2412.06464.
    """
    batch, _, channels = qkv.shape
    heads, width = len(a_log), z.shape[-1] // len(a_log)
    expected = (batch, weight.shape[1] - 1, channels), (batch, heads, key_dim, width)
    dtypes = qkv.dtype, torch.promote_types(qkv.dtype, torch.float32)
    for name, state, shape, dtype in zip(("rows", "memory"), (rows, memory), expected, dtypes):
        if state.shape != shape or state.dtype != dtype or not state.is_contiguous():
            raise ValueError(
                f"gated_delta_decode: {name} is {tuple(state.shape)} {state.dtype}; expected "
                f"{shape} {dtype}, contiguous"
            )
    ops = select("gated_delta_decode", qkv)
    weights = weight, a_log, dt_bias, norm_weight
    return ops.gated_delta_decode_forward(  # type: ignore[no-any-return]
        qkv, z, b, a, *weights, rows, memory, key_heads, key_dim, eps
    )
