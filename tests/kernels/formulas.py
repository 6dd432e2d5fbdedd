"""Simple formulas of all ops in eager PyTorch, with which the tests compare the ops.

In float64 a formula gives the exact result. In a test's dtype, its error sets the op's tolerance.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.checks import ClampedSwiGLU
from ligermodels.kernels.dispatch import autocast_dtype


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    wide = widened(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        return normed.to(x.dtype) * (weight + offset)
    return (normed * (widened(weight) + offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, **options
) -> tuple[Tensor, Tensor]:
    s = x if residual is None else x + residual
    return rms_norm(s, weight, **options), s


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    # F.layer_norm computes x * rstd - mean * rstd, which loses digits even in float64.
    wide = widened(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, *parameters, **options) -> tuple[Tensor, Tensor]:
    s = x + residual
    return layer_norm(s, *parameters, **options), s


def rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    sizes = [n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)]
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in qkv.split(sizes, -1))
    cos, sin = (x.to(qkv.dtype).unsqueeze(2) for x in (cos, sin))
    pairs, axis = cos.shape[-1], -1 if interleaved else -2

    def rotated(x: Tensor) -> Tensor:
        first, rest = x.tensor_split((2 * pairs,), -1)
        a, b = first.unflatten(-1, (pairs, 2) if interleaved else (2, pairs)).unbind(axis)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), axis)
        return torch.cat((turned.flatten(-2), rest), -1)

    return rotated(q), rotated(k), v


def qk_norm_rope(
    qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, gated=False, **options
) -> tuple[Tensor, ...]:
    wide = 2 * num_heads if gated else num_heads
    parts = qkv.unflatten(-1, (wide + 2 * num_kv_heads, -1))
    q, k, v = parts.split([wide, num_kv_heads, num_kv_heads], -2)
    gate = (q[..., 1::2, :],) if gated else ()
    q = rms_norm(q[..., ::2, :] if gated else q, q_weight, **options)
    k = rms_norm(k, k_weight, **options)
    qkv = torch.cat((q, k, v), -2).flatten(-2)
    return *rope(qkv, cos, sin, num_heads, num_kv_heads), *gate


def output_gate(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    activation: str = "sigmoid",
    eps: float = 1e-6,
) -> Tensor:
    x = x if weight is None else rms_norm(x, weight, eps)
    share = gate.sigmoid() if activation == "sigmoid" else F.silu(widened(gate))
    return (x * share).to(x.dtype)


def gate_linear(x, gate, norm_weight, weight, bias=None, **options) -> Tensor:
    return F.linear(output_gate(x, gate, norm_weight, **options).flatten(-2), weight, bias)


def glu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def norm_linear(x, residual, norm_weight, weight, bias=None, **options) -> tuple[Tensor, Tensor]:
    s = x if residual is None else x + residual
    return F.linear(rms_norm(s, norm_weight, **options), weight, bias), s


def norm_qkv_rope(cos, sin, num_heads, num_kv_heads, interleaved=False, **linear) -> tuple:
    qkv, s = norm_linear(**linear)
    return *rope(qkv, cos, sin, num_heads, num_kv_heads, interleaved), s


def glu_linear(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    return F.linear(glu(gate_up, activation), weight, bias)


def capped(logits: Tensor, softcap: float | None = None, scale: float = 1.0) -> Tensor:
    t = widened(logits) * scale
    return t if softcap is None else softcap * torch.tanh(t / softcap)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    return_token_stats: bool | Collection[str] = (),
    alternatives: Tensor | None = None,
    top_k: int = 0,
) -> tuple[Tensor, ...]:
    """Return loss, z-loss, the loss of each token, and what is asked of each, except classes."""
    t = capped(logits, softcap, logit_scale) / temperature
    weights = None if class_weights is None else class_weights.to(t.dtype)
    valid = targets != ignore_index
    loss = F.cross_entropy(
        t.reshape(-1, t.shape[-1]),
        targets.reshape(-1),
        weights,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(targets.shape)
    z = z_loss * torch.logsumexp(t, -1).square() * valid
    loss = loss + z
    if token_weights is not None:
        loss, z = loss * token_weights, z * token_weights

    log_p = torch.log_softmax(t, -1)
    index, p_log_p = torch.where(valid, targets, 0), log_p.exp() * log_p
    stats = {
        "log_probs": log_p.gather(-1, index[..., None])[..., 0] * valid,
        "entropy": -torch.where(log_p.exp() > 0, p_log_p, 0.0).sum(-1) * valid,
        "sum_sq_probs": log_p.detach().exp().square().sum(-1) * valid,
        "mean_logits": t.detach().mean(-1) * valid,
    }
    if return_token_stats is True:
        return_token_stats = ("log_probs", "entropy")
    asked = [x for name, x in stats.items() if name in (return_token_stats or ())]
    if alternatives is not None:
        kept = (alternatives >= 0) & valid[..., None]
        asked.append(log_p.gather(-1, torch.where(kept, alternatives, 0)) * kept)
    if top_k:
        asked.append(log_p.topk(top_k).values * valid[..., None])
    if reduction == "none":
        return loss, z, loss, *asked
    divisor: float | Tensor = 1.0
    if normalizer is not None:
        divisor = normalizer
    elif reduction == "mean" and valid.any():
        divisor = valid.sum() if weights is None else weights[targets[valid]].sum()
    return loss.sum() / divisor, z.sum() / divisor, loss.detach(), *(x.detach() for x in asked)


CHUNK_OPTIONS = ("chunk_size", "max_scratch_bytes", "skip_ignored", "max_valid")
"""Options that do not change a result."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options
) -> tuple[Tensor, ...]:
    options = {name: value for name, value in options.items() if name not in CHUNK_OPTIONS}
    return cross_entropy(F.linear(hidden, weight, bias), targets, **options)


def linear_log_probs(*args, entropy: bool = False, **options) -> tuple[Tensor, ...]:
    stats = ("log_probs", "entropy") if entropy else ("log_probs",)
    return linear_cross_entropy(*args, reduction="none", return_token_stats=stats, **options)[3:]


def linear_divergence(
    hidden, weight, teacher_hidden, teacher_weight, bias=None, teacher_bias=None, **options
) -> Tensor:
    given = options.get
    temperature, beta, mask = given("temperature", 1.0), given("beta", 0.5), given("mask")
    logits = capped(F.linear(hidden, weight, bias), given("softcap"), given("logit_scale", 1.0))
    teacher = F.linear(teacher_hidden, teacher_weight, teacher_bias)
    teacher = capped(teacher, given("teacher_softcap"), given("teacher_scale", 1.0))
    log_p, log_q = (torch.log_softmax(t / temperature, -1) for t in (logits, teacher))

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if beta is None:
        each = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    elif beta in (0, 1):
        each = kl(log_q, log_p) if beta == 0 else kl(log_p, log_q)
    else:
        log_m = torch.log((1 - beta) * log_p.exp() + beta * log_q.exp())
        each = beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)
    if mask is not None:
        each = torch.where(mask, each, torch.zeros_like(each))
    if given("token_weights") is not None:
        each = each * options["token_weights"]
    reduction = given("reduction", "mean")
    if reduction != "mean":
        return each if reduction == "none" else each.sum()
    count = each.numel() if mask is None else int(mask.sum())
    return each.sum() / (given("normalizer") or max(count, 1))


def routing(
    logits: Tensor,
    top_k: int,
    score: str = "softmax",
    normalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    n_group: int = 1,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    wide = widened(logits)
    scores = wide.softmax(-1) if score == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias
    if n_group > 1:  # the best group alone
        groups = choice.chunk(n_group, -1)
        best = torch.stack([x.sort(-1).values[..., -2:].sum(-1) for x in groups], -1)
        own = torch.arange(n_group, device=best.device) == best.argmax(-1, keepdim=True)
        inside = own.repeat_interleave(choice.shape[-1] // n_group, -1)
        choice = torch.where(inside, choice, -torch.inf)
    if experts is None:
        experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, experts.to(torch.int32)


def expert_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str | ClampedSwiGLU = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    out = torch.zeros((), dtype=weights.dtype, device=x.device)
    for expert, (up, down) in enumerate(zip(gate_up_weight, down_weight)):
        weight = (weights * (experts == expert)).sum(-1, keepdim=True)
        gate_up = x @ up.T
        if gate_up_bias is not None:
            gate_up = gate_up + gate_up_bias[expert].to(gate_up.dtype)
        if isinstance(activation, ClampedSwiGLU):
            alpha, limit = activation
            gate, half = gate_up.chunk(2, -1)
            gate = gate.clamp(max=limit)
            made = (half.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
        else:
            made = glu(gate_up, activation)
        y = made @ down.T
        y = y if down_bias is None else y + down_bias[expert].to(y.dtype)
        out = out + weight * y
    return out.to(y.dtype)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence, token by token."""
    batch, seq, heads, width = v.shape
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q * scale, k))
    q, k, rows, g, beta = (x.flatten(0, 1)[:, :, None] for x in (q, k, v, g, beta))
    ends = [seq * i for i in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    out, states = [v.new_empty(0, heads, 1, width)], [v.new_empty(0, heads, k.shape[3], width)]
    for document, (first, end) in enumerate(pairwise(ends)):
        state = v.new_zeros(heads, k.shape[3], width)
        if initial_state is not None:
            state = initial_state[document].to(v.dtype)
        for t in range(first, end):
            state = state * g[t, ..., None].exp().to(v.dtype)
            change = (rows[t] - k[t] @ state) * beta[t, ..., None].to(v.dtype)
            state = state + k[t].mT * change
            out.append((q[t] @ state.to(q.dtype))[None])
        states.append(state[None])
    # Without tokens, these have gradients.
    given = (q, k, v, g, beta, *([] if initial_state is None else [initial_state]))
    nothing = sum(x[:0].sum() for x in given)
    out = torch.cat(out[1:] or out).view(v.shape)
    return out + nothing.to(out.dtype), widened(torch.cat(states) + nothing)


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
) -> tuple[Tensor, ...]:
    batch, seq, channels = qkv.shape
    ends = [seq * i for i in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    rows, taps, keys = qkv.flatten(0, 1), weight.shape[1], key_heads * key_dim
    made = [rows[:0] * weight[:, 0]]
    for first, end in pairwise(ends):
        padded = F.pad(rows[first:end], (0, 0, taps - 1, 0))
        made.append(sum(padded[i : len(padded) - taps + 1 + i] * weight[:, i] for i in range(taps)))
    y = widened(F.silu(torch.cat(made))).view(batch, seq, channels)
    q, k = y[..., : 2 * keys].unflatten(-1, (2, key_heads, key_dim)).unbind(2)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    v = y[..., 2 * keys :].unflatten(-1, (len(a_log), -1))
    b, a, a_log, dt_bias = map(widened, (b, a, a_log, dt_bias))
    g = -a_log.exp() * F.softplus(a + dt_bias)
    return *(x.to(qkv.dtype) for x in (q, k, v)), g, b.sigmoid()


def gated_delta_layer(
    qkv: Tensor,
    *inputs: Tensor | int,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    **more: Tensor | int,
) -> tuple[Tensor, Tensor]:
    dtype = autocast_dtype(qkv)
    qkv = qkv if dtype is None else qkv.to(dtype)
    made = gated_delta_inputs(qkv, *inputs, **more, cu_seqlens=cu_seqlens)
    return gated_delta(*made, cu_seqlens, initial_state)
