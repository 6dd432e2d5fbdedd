"""Plain PyTorch: a causal convolution with SiLU, the norms of q and k, and the gates."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs
from ligermodels.kernels.dispatch import cast, compute_dtype

EPS = 1e-6


def _shifted(qkv: Tensor, cu_seqlens: Tensor, taps: int) -> Tensor:
    """Return (taps, tokens, channels): the last tokens before each and itself, or zeros."""
    tokens = torch.arange(len(qkv), device=qkv.device)
    start = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]
    source = tokens - torch.arange(taps - 1, -1, -1, device=qkv.device)[:, None]
    seen = (source >= start)[..., None]
    return torch.where(seen, cast(qkv, compute_dtype(qkv))[source.clamp(min=0)], 0)


def _normalized(y: Tensor) -> tuple[Tensor, Tensor]:
    rstd = (y * y).sum(-1, keepdim=True).add(EPS).rsqrt()
    return y * rstd, rstd


def _gates(b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
    """Return beta, the sum in the softplus, exp(a_log) and g."""
    b, a, a_log, dt_bias = (cast(x, compute_dtype(x)) for x in (b, a, a_log, dt_bias))
    rate = a_log.exp()
    return b.sigmoid(), a + dt_bias, rate, -rate * F.softplus(a + dt_bias)


def gated_delta_inputs_forward(
    inputs: DeltaInputs, key_heads: int, key_dim: int
) -> tuple[Tensor, ...]:
    """Return q, k (tokens, key heads, key_dim), v (tokens, heads, dv), g and beta (tokens, heads).

    Args: inputs: qkv (tokens, channels), q's heads first; b, a (tokens, heads); weight (channels,
        taps); a_log, dt_bias (heads,); cu_seqlens (documents + 1,).
    """
    qkv, b, a, weight, a_log, dt_bias, cu_seqlens = inputs
    taps, keys = weight.shape[1], key_heads * key_dim
    shifted = _shifted(qkv, cu_seqlens, taps)
    y = F.silu((shifted * cast(weight, shifted.dtype).T[:, None]).sum(0))
    q, k = (x.unflatten(-1, (key_heads, key_dim)) for x in y[:, : 2 * keys].chunk(2, -1))
    v = y[:, 2 * keys :].unflatten(-1, (len(a_log), -1))
    beta, _, _, g = _gates(b, a, a_log, dt_bias)
    q, k, v = (cast(x, qkv.dtype) for x in (_normalized(q)[0], _normalized(k)[0], v))
    return q, k, v, g, beta


def gated_delta_inputs_backward(
    inputs: DeltaInputs, grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients of qkv, b, a, weight, a_log and dt_bias. grads are of the outputs."""
    qkv, b, a, weight, a_log, dt_bias, cu_seqlens = inputs
    grad_q, grad_k, grad_v, grad_g, grad_beta = (cast(x, compute_dtype(x)) for x in grads)
    taps = weight.shape[1]
    shifted = _shifted(qkv, cu_seqlens, taps)
    wide = cast(weight, shifted.dtype)
    x = (shifted * wide.T[:, None]).sum(0)
    gate = x.sigmoid()
    keys = grad_q[0].numel() if len(qkv) else 0
    parts = []
    for i, grad in enumerate((grad_q, grad_k)):
        y = (x * gate)[:, i * keys : (i + 1) * keys].view(grad.shape)
        normed, rstd = _normalized(y)
        parts.append(rstd * (grad - normed * (grad * normed).sum(-1, keepdim=True)))
    grad_y = torch.cat([part.flatten(1) for part in (*parts, grad_v)], 1)
    grad_x = grad_y * gate * (1 + x * (1 - gate))

    # A token gets a gradient from itself and those after it in its document.
    tokens = torch.arange(len(qkv), device=qkv.device)
    end = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True)]
    source = tokens + torch.arange(taps - 1, -1, -1, device=qkv.device)[:, None]
    seen = (source < end)[..., None]
    later = torch.where(seen, grad_x[source.clamp(max=max(len(qkv) - 1, 0))], 0)
    grad_qkv = (later * wide.T[:, None]).sum(0)

    beta, total, rate, g = _gates(b, a, a_log, dt_bias)
    grad_total = -grad_g * rate * total.sigmoid()
    return (
        cast(grad_qkv, qkv.dtype),
        cast(grad_beta * beta * (1 - beta), b.dtype),
        cast(grad_total, a.dtype),
        cast((shifted * grad_x).sum(1).T, weight.dtype),
        cast((grad_g * g).sum(0), a_log.dtype),
        cast(grad_total.sum(0), dt_bias.dtype),
    )
