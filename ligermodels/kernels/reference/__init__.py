"""Every op in plain PyTorch: it defines the op, serves CPU tensors and is the tests' oracle.

Each op has a forward, differentiable by autograd, and a written-out backward with the same
signature as its Triton twin in `ligermodels.kernels.triton`. Arithmetic is float32, or float64
where the input is.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.target_weights import target_weight_sum


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). Compiled, torch 2.11 loses the gradient through a `to` that changes nothing."""
    return x if x.dtype == dtype else x.to(dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype an op calculates in: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# --- RMSNorm -------------------------------------------------------------------------------------


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    casting_mode: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add, then normalise: s = x + residual; y = (offset + weight) * s / sqrt(mean(s^2) + eps).

    Zhang and Sennrich 2019, arXiv:1910.07467. With casting_mode "llama" the normalised s is rounded
    to its own dtype before the product with the weight, as HF's Llama does; with "gemma" everything
    stays in float32 until the end.

    Args: x, residual (..., hidden); weight (hidden).
    Returns: y (..., hidden) in out_dtype, s (x itself without a residual), 1/rms (rows).
    """
    s = x if residual is None else x + residual
    dtype = compute_dtype(s)
    s_float = _cast(s, dtype)
    rstd = torch.rsqrt(s_float.pow(2).mean(-1, keepdim=True) + eps)
    normed = s_float * rstd
    if casting_mode == "llama":
        normed = _cast(_cast(normed, s.dtype), dtype)
    y = normed * (_cast(weight, dtype) + offset)
    return _cast(y, out_dtype), s, rstd.flatten()


def rms_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    want_weight: bool,
    want_y: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of `rms_norm_forward` with respect to s (grad_s of the residual stream included).

    Returns: grad of s in s's dtype, grad of weight or None, y recomputed in grad_y's dtype or None.
    """
    dtype = compute_dtype(s)
    normed = _cast(s, dtype) * rstd.view(*s.shape[:-1], 1)
    scaled = _cast(weight, dtype) + offset
    grad = _cast(grad_y, dtype)
    grad_normed = grad * scaled
    grad_x = grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = grad_x * rstd.view(*s.shape[:-1], 1)
    if grad_s is not None:
        grad_x = grad_x + _cast(grad_s, dtype)
    rounded = _cast(_cast(normed, s.dtype), dtype) if casting_mode == "llama" else normed
    grad_weight = y = None
    if want_weight:
        grad_weight = _cast((grad * rounded).sum_to_size(weight.shape), weight.dtype)
    if want_y:
        y = _cast(rounded * scaled, grad_y.dtype)
    return _cast(grad_x, s.dtype), grad_weight, y


# --- LayerNorm -----------------------------------------------------------------------------------


def layer_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add, then normalise: s = x + residual; y = weight * (s - mean(s)) / std(s) + bias.

    std(s) = sqrt(var(s) + eps), the variance divided by hidden. Ba et al. 2016, arXiv:1607.06450.

    Args: x, residual (..., hidden); weight, bias (hidden), one and zero where None.
    Returns: y (..., hidden) in x's dtype, s (x itself without a residual), the mean and 1/std of
        each row.
    """
    s = x if residual is None else x + residual
    dtype = compute_dtype(s)
    s_float = _cast(s, dtype)
    mean = s_float.mean(-1, keepdim=True)
    # What rounding left in the mean: of a row of equal values it would be all that is normalised.
    mean = mean + (s_float - mean).mean(-1, keepdim=True)
    centred = s_float - mean
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * _cast(weight, dtype)
    if bias is not None:
        y = y + _cast(bias, dtype)
    return _cast(y, x.dtype), s, mean.flatten(), rstd.flatten()


def layer_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of `layer_norm_forward` with respect to s (grad_s of the residual stream included).

    Args: as there; weight_dtype, bias_dtype None where that gradient is not wanted.
    Returns: grad of s in s's dtype, grads of weight and bias in those dtypes, or None.
    """
    dtype = compute_dtype(s)
    hidden = s.shape[-1]
    mean, rstd = (t.view(*s.shape[:-1], 1) for t in (mean, rstd))
    normed = (_cast(s, dtype) - mean) * rstd
    grad = _cast(grad_y, dtype)
    grad_normed = grad if weight is None else grad * _cast(weight, dtype)
    slope = (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = (grad_normed - grad_normed.mean(-1, keepdim=True) - normed * slope) * rstd
    if grad_s is not None:
        grad_x = grad_x + _cast(grad_s, dtype)
    grad_weight = grad_bias = None
    if weight_dtype is not None:
        grad_weight = _cast((grad * normed).sum_to_size(hidden), weight_dtype)
    if bias_dtype is not None:
        grad_bias = _cast(grad.sum_to_size(hidden), bias_dtype)
    return _cast(grad_x, s.dtype), grad_weight, grad_bias


# --- RoPE ----------------------------------------------------------------------------------------


def rope_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, in_place: bool
) -> Tensor:
    """The rotary embedding of q and k within packed rows; v is left as it is.

    Su et al. 2021, arXiv:2104.09864, in the half-split layout of HF checkpoints: with (a, b) the
    two halves of a head, (a cos - b sin, b cos + a sin).

    Args: qkv (batch, seq, (heads + 2 kv heads) * head_dim); cos, sin (batch or 1, seq,
        head_dim / 2); in_place: qkv is contiguous and may be overwritten.
    Returns: the rows in qkv's shape, in qkv itself or a new tensor.
    """
    dtype = compute_dtype(qkv)
    cos, sin = _cast(cos, dtype), _cast(sin, dtype)
    rotated = (num_heads + num_kv_heads) * 2 * cos.shape[-1]
    heads = qkv[..., :rotated].unflatten(-1, (-1, 2 * cos.shape[-1]))
    turned = _cast(_rotated(_cast(heads, dtype), cos, sin), qkv.dtype).flatten(-2)
    if not in_place or torch.compiler.is_compiling():
        # Compiled, writes become copies anyway, and torch 2.11 loses those through views.
        return torch.cat((turned, qkv[..., rotated:]), -1)
    qkv[..., :rotated] = turned
    return qkv


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Gradient of `rope_forward`: q's and k's turned back, v's copied, the three packed.

    Args: grad_q (batch, seq, heads, head_dim), grad_k, grad_v (batch, seq, kv heads, head_dim),
        any strides; cos, sin as there.
    Returns: (batch, seq, (heads + 2 kv heads) * head_dim), a new tensor.
    """
    dtype = compute_dtype(grad_q)
    cos, sin = _cast(cos, dtype), _cast(sin, dtype)
    turned = (_cast(_rotated(_cast(x, dtype), cos, -sin), x.dtype) for x in (grad_q, grad_k))
    return torch.cat((*turned, grad_v), -2).flatten(-2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# --- RMSNorm of heads, then RoPE -----------------------------------------------------------------


def qk_norm_rope_forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    casting_mode: str,
) -> Tensor:
    """Normalise each head as `rms_norm_forward` does over head_dim, then rotate it.

    Args: q (batch, seq, heads, head_dim), k (batch, seq, kv heads, head_dim), any strides;
        q_weight, k_weight (head_dim); cos, sin (batch or 1, seq, head_dim / 2).
    Returns: (batch, seq, heads + kv heads, head_dim), rounded to q's dtype once at the end.
    """
    dtype = compute_dtype(q)
    cos, sin = _cast(cos, dtype), _cast(sin, dtype)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        y, _, _ = rms_norm_forward(x, None, weight, eps, offset, casting_mode, dtype)
        return _rotated(y, cos, sin)

    return _cast(torch.cat((one(q, q_weight), one(k, k_weight)), -2), q.dtype)


def qk_norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    casting_mode: str,
    want_weights: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `qk_norm_rope_forward`, 1/rms recomputed, and grad_v packed behind them.

    Returns: (batch, seq, (heads + 2 kv heads) * head_dim) in q's dtype, and the gradients of
        q_weight and k_weight, or None.
    """
    dtype = compute_dtype(q)
    cos, sin = _cast(cos, dtype), _cast(sin, dtype)

    def one(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rstd = torch.rsqrt(_cast(x, dtype).pow(2).mean(-1) + eps)
        grad = _rotated(_cast(grad, dtype), cos, -sin)
        grad_x, grad_weight, _ = rms_norm_backward(
            grad, None, x, weight, rstd, offset, casting_mode, want_weights, False
        )
        return grad_x, grad_weight

    grad_q, grad_q_weight = one(q, q_weight, grad_q)
    grad_k, grad_k_weight = one(k, k_weight, grad_k)
    grad_qkv = torch.cat((grad_q, grad_k, _cast(grad_v, q.dtype)), -2).flatten(-2)
    return grad_qkv, grad_q_weight, grad_k_weight


# --- GLU -----------------------------------------------------------------------------------------


def glu_forward(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up for gate_up (..., 2 * intermediate). Shazeer 2020, arXiv:2002.05202.

    Args: activation "silu"; "gelu_tanh" or "gelu", arXiv:1606.08415, approximated or with erf.
    """
    gate, up = _cast(gate_up, compute_dtype(gate_up)).chunk(2, -1)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return _cast(gate * up, gate_up.dtype)


def glu_backward(
    gate_up: Tensor, grad: Tensor, activation: str, want_out: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient of `glu_forward` (..., 2 * intermediate), and its output again if wanted."""
    dtype = compute_dtype(gate_up)
    gate, up = _cast(gate_up, dtype).chunk(2, -1)
    grad = _cast(grad, dtype)
    # The activation is gate * phi(gate); slope is the derivative of phi.
    if activation == "silu":
        phi = torch.sigmoid(gate)
        slope = phi * (1 - phi)
    elif activation == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        two_u = math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
        phi = torch.sigmoid(two_u)
        slope = phi * (1 - phi) * math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * gate**2)
    else:
        phi = (1 + torch.erf(gate * math.sqrt(0.5))) / 2
        slope = torch.exp(-(gate**2) / 2) / math.sqrt(2 * math.pi)
    activated = gate * phi
    grad_gate = grad * up * (phi + gate * slope)
    out = _cast(activated * up, gate_up.dtype) if want_out else None
    return _cast(torch.cat((grad_gate, grad * activated), -1), gate_up.dtype), out


# --- Cross entropy -------------------------------------------------------------------------------


class CrossEntropyOptions(NamedTuple):
    """What the cross entropy kernels take beside tensors; `cross_entropy` explains each."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


class TokenStats(NamedTuple):
    """What is known of each token beside its loss, (rows) each; zeros where it is ignored."""

    log_probs: Tensor  # log softmax(t) at the target, float32, or float64 for float64 logits
    entropy: Tensor  # of softmax(t) in nats, same dtype
    correct: Tensor  # bool: no class has a higher logit, nor an equal one and a lower index

    @classmethod
    def empty(cls, rows: int, logits: Tensor) -> "TokenStats":
        """Uninitialised memory for the statistics of `rows` tokens, on the device of `logits`."""
        dtype, device = compute_dtype(logits), logits.device
        return cls(
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=dtype, device=device),
            torch.empty(rows, dtype=torch.bool, device=device),
        )


class StatsScale(NamedTuple):
    """Upstream gradients of the statistics, (rows) each, and the entropy that the second needs."""

    log_probs: Tensor | None
    entropy: Tensor | None
    value: Tensor | None  # the entropy itself, from the forward pass


def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    row_scale: Tensor | None,
    lse: Tensor | None,
    class_weights: Tensor | None,
    options: CrossEntropyOptions,
    in_place: bool,
    stats: TokenStats | None = None,
    stats_scale: StatsScale | None = None,
    first_column: int = 0,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss of each row and, given row_scale, the gradient of sum(row_scale * loss).

    t = softcap * tanh(logit_scale * logits / softcap); loss = cross entropy of t, with class
    weights and label smoothing as in `torch.nn.functional.cross_entropy`, + z_loss * lse(t)^2.
    A row whose target is neither in the vocabulary nor ignore_index gets NaN.

    Args: logits (rows, vocab); targets (rows) int64; row_scale (rows) or (1,) float32, or None
        for no gradient; lse (rows, 2) from an earlier call, which spares a pass over the logits;
        class_weights (vocab); in_place overwrites logits with the gradient; stats is filled where
        given, not together with lse; stats_scale adds the gradient of sum(stats_scale.log_probs *
        log_probs) + sum(stats_scale.entropy * entropy). With first_column and vocab, logits
        (rows, columns) are those of classes first_column, first_column + 1, ... of `vocab`, and
        lse must be given.
    Returns: loss (rows) with the z-loss included, z-loss (rows), lse (rows, 2), gradient
        (rows, vocab) or None. All but the gradient are float32, or float64 for float64 logits;
        with lse given, the first two may be anything. lse is the largest t and the logarithm of
        sum(exp(t - largest)): their sum, the logsumexp, would be rounded to the size of the
        largest. It is to be handed back only: an implementation may keep it in other units, and
        anything for an ignored row.
    """
    ignore_index, label_smoothing, z_loss, softcap, logit_scale = options
    columns = logits.shape[-1]
    vocab = columns if vocab is None else vocab
    scaled = _cast(logits, compute_dtype(logits)) * logit_scale
    t, tanh = scaled, None
    if softcap is not None:
        tanh = torch.tanh(scaled / softcap)
        t = softcap * tanh
    valid = targets != ignore_index
    inside = (targets >= 0) & (targets < vocab)
    index = torch.where(inside, targets, 0)
    ones = t.new_ones(1).expand(vocab)  # without memory of their own
    weights = ones if class_weights is None else _cast(class_weights, t.dtype)
    target_weight = weights[index] * (1 - label_smoothing)
    smooth = label_smoothing / vocab
    nan = _cast(torch.where(inside, 0.0, float("nan")), t.dtype)
    if lse is not None:
        loss = z = lse
        top, log_sum = lse.unbind(-1)
    else:
        top = t.amax(-1)
        log_sum = torch.exp(t - top[:, None]).sum(-1).log()
        lse = torch.stack((top, log_sum), -1)
        target_t = t.gather(-1, index[:, None])[:, 0]
        target_log_p = target_t - top - log_sum
        loss = -target_weight * target_log_p
        if label_smoothing:
            # Everything less the target: sums over large logits would lose their differences.
            anchor = torch.where(target_t == -torch.inf, 0.0, target_t)
            above = top - anchor + log_sum
            weighted = ((t - anchor[:, None]) * weights).sum(-1)
            loss = loss + smooth * (above * weights.sum() - weighted)
        z = z_loss * (top + log_sum) * (top + log_sum)
        loss = torch.where(valid, loss + z + nan, 0.0)
        z = torch.where(valid, z + nan, 0.0)
        if stats is not None:
            log_p = t - top[:, None] - log_sum[:, None]
            p = torch.exp(log_p)
            entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
            # Compared before the softcap, which may round unequal logits to equal ones.
            best = scaled.gather(-1, index[:, None])
            before = torch.arange(columns, device=t.device) < index[:, None]
            beaten = ((scaled > best) | ((scaled == best) & before)).any(-1) | best[:, 0].isnan()
            stats.log_probs.copy_(torch.where(valid, target_log_p + nan, 0.0))
            stats.entropy.copy_(torch.where(valid, entropy + nan, 0.0))
            stats.correct.copy_(valid & inside & ~beaten)
    if row_scale is None:
        return loss, z, lse, None

    scale = torch.where(valid, _cast(row_scale, t.dtype) + nan, 0.0)
    at_target = -target_weight * scale
    factor = (target_weight + smooth * weights.sum() + 2 * z_loss * (top + log_sum)) * scale
    if stats_scale is not None and stats_scale.log_probs is not None:
        at_target = at_target + stats_scale.log_probs
        factor = factor - stats_scale.log_probs
    p = torch.exp(t - top[:, None] - log_sum[:, None])
    grad = p * factor[:, None]
    here = index - first_column
    mine = (here >= 0) & (here < columns)
    grad = grad.scatter_add(
        -1, torch.where(mine, here, 0)[:, None], torch.where(mine, at_target, 0.0)[:, None]
    )
    if label_smoothing:
        block = weights[first_column : first_column + columns]
        grad = grad - (smooth * scale)[:, None] * block
    if stats_scale is not None and stats_scale.entropy is not None:
        assert stats_scale.value is not None
        # p log p is 0 where p is, -infinity or not.
        log_p = t - top[:, None] - (log_sum - stats_scale.value)[:, None]
        grad = grad - stats_scale.entropy[:, None] * torch.where(p == 0, 0.0, p * log_p)
    if tanh is not None:
        grad = grad * (1 - tanh * tanh)
    # An ignored row gets exact zeros even where its logits are not finite.
    grad = _cast(torch.where(valid[:, None], grad * logit_scale, 0.0), logits.dtype)
    return loss, z, lse, logits.copy_(grad) if in_place else grad


def mean_loss(
    loss: Tensor,
    z_loss: Tensor,
    divisor: Tensor | None,
    targets: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of loss (rows), that of z_loss (rows) and what both are divided by, scalars.

    A divisor of None stands for `target_weight_sum` of the targets, which must then be given.
    """
    if divisor is None:
        assert targets is not None
        divisor = target_weight_sum(targets, class_weights, ignore_index, loss.dtype)
    return loss.sum() / divisor, z_loss.sum() / divisor, divisor


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in dtype, for a scale of one element; multiplied in float32 or wider.

    In x's own low precision the scale would be rounded first, and with it every element alike.
    """
    scale = _cast(scale, compute_dtype(x)).view([1] * x.ndim)
    if torch.compiler.is_compiling():
        return _cast(x * scale, dtype)
    # Straight into dtype, without a float32 product beside it.
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))
