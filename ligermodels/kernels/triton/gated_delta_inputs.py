"""Causal convolution with SiLU, the norms of q and k, and the gates, with a launch each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, launch
from ligermodels.kernels.triton.norm_tile import column_sums

# `rows` is the tokens of a tile, which has the columns of one head.
INPUTS = Launches(nvidia=((None, Launch(0, 4, rows=32)),), amd=((None, Launch(0, 4, rows=32)),))
INPUTS_BACKWARD = Launches(
    nvidia=((None, Launch(0, 8, rows=32)),), amd=((None, Launch(0, 8, rows=32)),)
)
MOST_PARTS = 256  # of the sums of a gradient of the weights
EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _starts(cu_seqlens_ptr, token, documents):
    """Return the first token of each token's document."""
    start = tl.zeros_like(token)
    for first in range(0, documents, 64):
        document = first + tl.arange(0, 64)
        begin = tl.load(cu_seqlens_ptr + document, mask=document < documents, other=0)[None, :]
        start = tl.maximum(start, tl.max(tl.where(begin <= token[:, None], begin, 0), 1))
    return start


@triton.jit
def _before(x_ptr, x_token, token, start, tokens, column, wide, BACK: tl.constexpr):
    """Load the rows that are BACK tokens before each, or zeros."""
    seen = (token - BACK >= start) & (token < tokens)
    at = (token - BACK).to(tl.int64)[:, None] * x_token + column[None, :]
    return tl.load(x_ptr + at, mask=seen[:, None] & wide[None, :], other=0.0).to(tl.float32)


@triton.jit
def _convolved(x_ptr, x_token, weight_ptr, token, start, tokens, column, wide, TAPS: tl.constexpr):
    out = tl.zeros((token.shape[0], column.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        x = _before(x_ptr, x_token, token, start, tokens, column, wide, TAPS - 1 - tap)
        weight = tl.load(weight_ptr + column * TAPS + tap, mask=wide, other=0.0).to(tl.float32)
        out += x * weight[None, :]
    return out


@triton.jit
def _load_gates(x_ptr, token, head, tokens, HEADS: tl.constexpr):
    at = token.to(tl.int64)[:, None] * HEADS + head[None, :]
    mask = (token < tokens)[:, None] & (head < HEADS)[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), at, mask


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _load_rates(a_log_ptr, dt_bias_ptr, head, HEADS: tl.constexpr):
    a_log = tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
    return tl.exp(a_log)[None, :], dt_bias[None, :]


@triton.jit
def _write_gates(
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    token,
    tokens,
    HEADS: tl.constexpr,
    GATES: tl.constexpr,
):
    head = tl.arange(0, GATES)
    rate, dt_bias = _load_rates(a_log_ptr, dt_bias_ptr, head, HEADS)
    b, at, mask = _load_gates(b_ptr, token, head, tokens, HEADS)
    a, at, mask = _load_gates(a_ptr, token, head, tokens, HEADS)
    tl.store(beta_ptr + at, tl.sigmoid(b), mask=mask)
    tl.store(g_ptr + at, -rate * _softplus(a + dt_bias), mask=mask)


@triton.jit
def _write_gate_gradients(
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    grad_g_ptr,
    grad_beta_ptr,
    grad_b_ptr,
    grad_a_ptr,
    grad_gates_ptr,
    part,
    parts,
    tokens,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    GATES: tl.constexpr,
):
    head = tl.arange(0, GATES)
    rate, dt_bias = _load_rates(a_log_ptr, dt_bias_ptr, head, HEADS)
    grad_a_log = tl.zeros((GATES,), tl.float32)
    grad_dt_bias = tl.zeros((GATES,), tl.float32)
    for tile in range(part, tl.cdiv(tokens, ROWS), parts):
        token = tile * ROWS + tl.arange(0, ROWS)
        b, at, mask = _load_gates(b_ptr, token, head, tokens, HEADS)
        a, at, mask = _load_gates(a_ptr, token, head, tokens, HEADS)
        grad_g, at, mask = _load_gates(grad_g_ptr, token, head, tokens, HEADS)
        grad_beta, at, mask = _load_gates(grad_beta_ptr, token, head, tokens, HEADS)
        beta = tl.sigmoid(b)
        grad_b = grad_beta * beta * (1.0 - beta)
        tl.store(grad_b_ptr + at, grad_b.to(grad_b_ptr.dtype.element_ty), mask=mask)
        a += dt_bias
        grad_a_log -= tl.sum(grad_g * rate * _softplus(a), 0)
        grad_a = -grad_g * rate * tl.sigmoid(a)
        grad_dt_bias += tl.sum(grad_a, 0)
        tl.store(grad_a_ptr + at, grad_a.to(grad_a_ptr.dtype.element_ty), mask=mask)
    grad_gates_ptr += part * 2 * HEADS
    tl.store(grad_gates_ptr + head, grad_a_log, mask=head < HEADS)
    tl.store(grad_gates_ptr + HEADS + head, grad_dt_bias, mask=head < HEADS)


@triton.jit
def gated_delta_inputs_forward_kernel(
    qkv_ptr,
    qkv_token,
    b_ptr,
    a_ptr,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    tokens,
    documents,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
):
    """Each program handles some tokens of one head of q, k or v; the last one their gates."""
    programs: tl.constexpr = 2 * KEY_HEADS + HEADS + 1
    keys: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    program = tl.program_id(0) % programs
    token = tl.program_id(0) // programs * ROWS + tl.arange(0, ROWS)
    if program == programs - 1:
        _write_gates(
            b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, token, tokens, HEADS, GATES
        )
    else:
        channel, columns, length = program * KEY_DIM, KEY_DIM, KEY_HEADS * KEY_DIM
        if program < KEY_HEADS:
            out_ptr = q_ptr + channel
        elif program < 2 * KEY_HEADS:
            out_ptr = k_ptr + channel - KEY_HEADS * KEY_DIM
        else:
            own = (program - 2 * KEY_HEADS) * VALUE_DIM
            channel, columns, length = own + keys, VALUE_DIM, HEADS * VALUE_DIM
            out_ptr = v_ptr + own
        column = tl.arange(0, WIDTH)
        wide = column < columns
        start = _starts(cu_seqlens_ptr, token, documents)
        weight_ptr += channel * TAPS
        x = _convolved(
            qkv_ptr + channel, qkv_token, weight_ptr, token, start, tokens, column, wide, TAPS
        )
        y = x * tl.sigmoid(x)
        if program < 2 * KEY_HEADS:
            y *= tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
        at = token.to(tl.int64)[:, None] * length + column[None, :]
        mask = (token < tokens)[:, None] & wide[None, :]
        tl.store(out_ptr + at, y.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_delta_inputs_backward_kernel(
    qkv_ptr,
    qkv_token,
    b_ptr,
    a_ptr,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_g_ptr,
    grad_beta_ptr,
    grad_qkv_ptr,
    grad_b_ptr,
    grad_a_ptr,
    grad_weight_ptr,
    grad_gates_ptr,
    tokens,
    documents,
    parts,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    WIDE_TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
):
    """Each program handles every so many tiles of one head, and writes a part of the sums."""
    programs: tl.constexpr = 2 * KEY_HEADS + HEADS + 1
    keys: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    channels: tl.constexpr = keys + HEADS * VALUE_DIM
    program = tl.program_id(0) % programs
    part = tl.program_id(0) // programs
    if program == programs - 1:
        _write_gate_gradients(
            b_ptr,
            a_ptr,
            a_log_ptr,
            dt_bias_ptr,
            grad_g_ptr,
            grad_beta_ptr,
            grad_b_ptr,
            grad_a_ptr,
            grad_gates_ptr,
            part,
            parts,
            tokens,
            HEADS,
            ROWS,
            GATES,
        )
    else:
        channel, columns, length = program * KEY_DIM, KEY_DIM, KEY_HEADS * KEY_DIM
        if program < KEY_HEADS:
            grad_ptr = grad_q_ptr + channel
        elif program < 2 * KEY_HEADS:
            grad_ptr = grad_k_ptr + channel - KEY_HEADS * KEY_DIM
        else:
            own = (program - 2 * KEY_HEADS) * VALUE_DIM
            channel, columns, length = own + keys, VALUE_DIM, HEADS * VALUE_DIM
            grad_ptr = grad_v_ptr + own
        column = tl.arange(0, WIDTH)
        wide = column < columns
        qkv_ptr += channel
        weight_ptr += channel * TAPS
        row, tap = tl.arange(0, ROWS), tl.arange(0, WIDE_TAPS)
        step: tl.constexpr = ROWS - TAPS + 1  # the last rows are there for those before them
        sums = tl.zeros((WIDTH, WIDE_TAPS), tl.float32)
        for tile in range(part, tl.cdiv(tokens, step), parts):
            token = tile * step + row
            start = _starts(cu_seqlens_ptr, token, documents)
            x = _convolved(qkv_ptr, qkv_token, weight_ptr, token, start, tokens, column, wide, TAPS)
            gate = tl.sigmoid(x)
            at = token.to(tl.int64)[:, None] * length + column[None, :]
            mask = (token < tokens)[:, None] & wide[None, :]
            grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if program < 2 * KEY_HEADS:
                rstd = tl.rsqrt(tl.sum(x * gate * x * gate, 1) + EPS)[:, None]
                normed = x * gate * rstd
                grad = rstd * (grad - normed * tl.sum(grad * normed, 1)[:, None])
            grad *= gate * (1.0 + x * (1.0 - gate))
            own = (row < step)[:, None]
            grad_qkv = tl.zeros((ROWS, WIDTH), tl.float32)
            for ahead in tl.static_range(TAPS):
                at_tap = weight_ptr + column * TAPS + TAPS - 1 - ahead
                weight = tl.load(at_tap, mask=wide, other=0.0).to(tl.float32)
                index = tl.minimum(row + ahead, ROWS - 1)[:, None] + tl.zeros_like(column)[None, :]
                reads = (_starts(cu_seqlens_ptr, token + ahead, documents) == start)[:, None]
                later = tl.where(reads, tl.gather(grad, index, 0), 0.0)
                grad_qkv += later * weight[None, :]
                x = _before(qkv_ptr, qkv_token, token, start, tokens, column, wide, ahead)
                of_tap = (tap == TAPS - 1 - ahead).to(tl.float32)
                sums += tl.sum(tl.where(own, grad * x, 0.0), 0)[:, None] * of_tap[None, :]
            at = token.to(tl.int64)[:, None] * channels + channel + column[None, :]
            tl.store(grad_qkv_ptr + at, grad_qkv.to(grad_qkv_ptr.dtype.element_ty), mask=mask & own)
        grad_weight_ptr += (part.to(tl.int64) * channels + channel) * TAPS
        tap_at = column[:, None] * TAPS + tap[None, :]
        tl.store(grad_weight_ptr + tap_at, sums, mask=wide[:, None] & (tap < TAPS)[None, :])


def _sizes(
    weight: Tensor, heads: int, key_heads: int, key_dim: int, setting: Launch
) -> dict[str, int]:
    value_dim = (len(weight) - 2 * key_heads * key_dim) // heads
    return {
        "KEY_HEADS": key_heads,
        "KEY_DIM": key_dim,
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "TAPS": weight.shape[1],
        "ROWS": setting.rows,
        "WIDTH": triton.next_power_of_2(max(key_dim, value_dim)),
        "GATES": triton.next_power_of_2(heads),
        "num_warps": setting.num_warps,
        "num_stages": setting.num_stages,
    }


def gated_delta_inputs_forward(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    key_heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel for `reference.gated_delta_inputs_forward`."""
    tokens, heads = len(qkv), len(a_log)
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    value_dim = (len(weight) - 2 * key_heads * key_dim) // heads
    q, k = (qkv.new_empty(tokens, key_heads, key_dim) for _ in "qk")
    v = qkv.new_empty(tokens, heads, value_dim)
    g, beta = (qkv.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2))
    if tokens:
        setting = launch(INPUTS, key_dim)
        sizes = _sizes(weight, heads, key_heads, key_dim, setting)
        gated_delta_inputs_forward_kernel[
            (cdiv(tokens, setting.rows) * (2 * key_heads + heads + 1),)
        ](
            qkv,
            qkv.stride(0),
            b.contiguous(),
            a.contiguous(),
            weight.contiguous(),
            a_log.contiguous(),
            dt_bias.contiguous(),
            cu_seqlens,
            q,
            k,
            v,
            g,
            beta,
            tokens,
            len(cu_seqlens) - 1,
            **sizes,
        )
    return q, k, v, g, beta


def gated_delta_inputs_backward(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels for `reference.gated_delta_inputs_backward`."""
    tokens, heads = len(qkv), len(a_log)
    key_heads, key_dim = grads[0].shape[1:]
    setting = launch(INPUTS_BACKWARD, key_dim)
    parts = min(cdiv(tokens, setting.rows - weight.shape[1] + 1), MOST_PARTS)
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    grad_qkv, grad_b, grad_a = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (qkv, b, a)
    )
    grad_weight = weight.new_empty(parts, weight.numel(), dtype=torch.float32)
    grad_gates = weight.new_empty(parts, 2 * heads, dtype=torch.float32)
    if parts:
        sizes = _sizes(weight, heads, key_heads, key_dim, setting)
        gated_delta_inputs_backward_kernel[(parts * (2 * key_heads + heads + 1),)](
            qkv,
            qkv.stride(0),
            b.contiguous(),
            a.contiguous(),
            weight.contiguous(),
            a_log.contiguous(),
            dt_bias.contiguous(),
            cu_seqlens,
            *(grad.contiguous() for grad in grads),
            grad_qkv,
            grad_b,
            grad_a,
            grad_weight,
            grad_gates,
            tokens,
            len(cu_seqlens) - 1,
            parts,
            WIDE_TAPS=triton.next_power_of_2(weight.shape[1]),
            **sizes,
        )
    (weights,) = column_sums(grad_weight, [weight.dtype])
    grad_a_log, grad_dt_bias = column_sums(grad_gates, [a_log.dtype, dt_bias.dtype])
    return grad_qkv, grad_b, grad_a, weights.view(weight.shape), grad_a_log, grad_dt_bias
