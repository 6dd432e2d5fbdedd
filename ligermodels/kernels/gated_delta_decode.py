"""A layer's gated delta rule for few new tokens of each row; it overwrites the layer's state."""

from torch import Tensor

from ligermodels.kernels.dispatch import select, without_autocast


def gated_delta_decode(
    projected: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    state: tuple[Tensor, Tensor],
    key_heads: int,
    key_dim: int,
    eps: float = 1e-6,
) -> Tensor:
    """Return what `gated_delta_layer` and `output_gate` make of the next tokens.

    It overwrites the state with that after them, in one launch, which a CUDA graph can hold. It
    computes token by token and has no gradient.

    Args:
        projected: (batch, seq, channels + heads * dv + 2 * heads), in this order qkv, the gate of
            the output, b and a; key_heads, key_dim: as in `gated_delta_layer`.
        weights: the convolution's (channels, taps), a_log and dt_bias (heads,), and that of the
            norm of the output (dv,).
        state: that before these tokens, contiguous: the last rows of qkv, (batch, taps - 1,
            channels), and the memory, (batch, heads, key_dim, dv) in float32 (float64 for float64
            inputs).
        eps: of the norm of the output.
    Returns: (batch, seq, heads * dv) in its dtype.
    Source: arXiv:2412.06464.
    """
    ops = select("gated_delta_decode", projected)
    args = projected, weights, state, key_heads, key_dim, eps
    with without_autocast(projected):
        return ops.gated_delta_decode_forward(*args)  # type: ignore[no-any-return]
