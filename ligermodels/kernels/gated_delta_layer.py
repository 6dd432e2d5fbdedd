"""The gated delta rule with its inputs, which keeps only the outputs of the projections."""

from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs, check_documents, check_floating, misfit
from ligermodels.kernels.dispatch import apply, autocast_dtype, compute_dtype, without_autocast
from ligermodels.kernels.gated_delta import DeltaFunction, row_starts

_OP = "gated_delta_layer"


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
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `gated_delta` of what a layer's projections make; save only the arguments.

    q, k and v are silu(conv(qkv)), where each channel has its own causal convolution over the last
    tokens of its document. Each head of q and k is divided by sqrt(sum of squares + 1e-6).
    g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b). This is one launch, which
    computes in float32 and rounds once; backward computes it again.

    Args:
        qkv: (batch, seq, 2 * key_heads * key_dim + heads * dv), q first. Autocast casts it.
        b, a: (batch, seq, heads).
        weight: (channels, taps) of the convolution, the tap of the token itself last.
        a_log, dt_bias: (heads,).
        key_heads, key_dim: the heads of q and k, and their size.
        cu_seqlens, initial_state: as in `gated_delta`.
    Returns: (batch, seq, heads, dv) in qkv's dtype, and the state after each document, (documents,
        heads, key_dim, dv) in float32 (float64 for float64 inputs).
    Raises: ValueError if a shape does not fit.
    Source: arXiv:2412.06464.
    """
    tensors = qkv, b, a, weight, a_log, dt_bias
    for name, tensor in zip(DeltaInputs._fields, tensors, strict=False):
        check_floating(_OP, name, tensor)
    keys, heads = key_heads * key_dim, len(a_log)
    fits = qkv.dim() == 3 and b.shape == a.shape == (*qkv.shape[:2], heads)
    fits = fits and a_log.shape == dt_bias.shape and weight.dim() == 2
    fits = fits and qkv.shape[-1] == len(weight) and len(weight) > 2 * keys
    if not fits or (len(weight) - 2 * keys) % heads:
        expected = (
            "(batch, seq, channels), (batch, seq, heads) twice, (channels, taps) and (heads,) "
            f"twice, with channels = 2 * {key_heads} * {key_dim} + a multiple of heads"
        )
        raise misfit(_OP, expected, **dict(zip(DeltaInputs._fields, tensors, strict=False)))
    sizes = heads, key_dim, (len(weight) - 2 * keys) // heads
    check_documents(_OP, qkv, cu_seqlens, initial_state, sizes)
    dtype = autocast_dtype(qkv)
    qkv = qkv if dtype is None else qkv.to(dtype)
    if initial_state is not None:
        initial_state = initial_state.to(compute_dtype(qkv))
    rows, starts = (x.flatten(0, 1) for x in (qkv, b, a)), row_starts(qkv, cu_seqlens)
    given = *rows, weight, a_log, dt_bias, starts, initial_state
    with without_autocast(qkv):
        out, state = apply(DeltaFunction, _OP, key_dim**-0.5, (key_heads, key_dim), *given)
    return out.unflatten(0, qkv.shape[:2]), state
