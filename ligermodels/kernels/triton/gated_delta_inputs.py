"""Causal convolution with SiLU, the norms of q and k, and the gates, with a launch each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.checks import DeltaInputs
from ligermodels.kernels.launch import Launch, Launches, cdiv, launch, strided
from ligermodels.kernels.triton.column_sums import column_sums

# `rows` is the tokens of a tile, which has the columns of one head.
INPUTS = Launches(nvidia=Launch(0, 4, rows=32), amd=Launch(0, 4, rows=32))
INPUTS_BACKWARD = Launches(nvidia=Launch(0, 8, rows=32), amd=Launch(0, 8, rows=32))
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
def gated_delta_inputs_kernel(
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
    """Each program handles every so many tiles of one head of q, k or v; the last one their gates.

    It writes q, k, v, g and beta. With grad_qkv_ptr it reads their gradients there, and writes the
    gradients of the inputs, and its part of the sums for those of the weights.
    """
    programs: tl.constexpr = 2 * KEY_HEADS + HEADS + 1
    keys: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    channels: tl.constexpr = keys + HEADS * VALUE_DIM
    program, part = tl.program_id(0) % programs, tl.program_id(0) // programs
    row = tl.arange(0, ROWS)
    if program == programs - 1:
        head = tl.arange(0, GATES)
        rate, dt_bias = _load_rates(a_log_ptr, dt_bias_ptr, head, HEADS)
        grad_a_log = tl.zeros((GATES,), tl.float32)
        grad_dt_bias = tl.zeros((GATES,), tl.float32)
        for tile in range(part, tl.cdiv(tokens, ROWS), parts):
            token = tile * ROWS + row
            b, at, mask = _load_gates(b_ptr, token, head, tokens, HEADS)
            a, at, mask = _load_gates(a_ptr, token, head, tokens, HEADS)
            beta, a = tl.sigmoid(b), a + dt_bias
            if grad_qkv_ptr is None:
                tl.store(beta_ptr + at, beta, mask=mask)
                tl.store(g_ptr + at, -rate * _softplus(a), mask=mask)
            else:
                grad_g, at, mask = _load_gates(g_ptr, token, head, tokens, HEADS)
                grad_beta, at, mask = _load_gates(beta_ptr, token, head, tokens, HEADS)
                grad_b = grad_beta * beta * (1.0 - beta)
                tl.store(grad_b_ptr + at, grad_b.to(grad_b_ptr.dtype.element_ty), mask=mask)
                grad_a_log -= tl.sum(grad_g * rate * _softplus(a), 0)
                grad_a = -grad_g * rate * tl.sigmoid(a)
                grad_dt_bias += tl.sum(grad_a, 0)
                tl.store(grad_a_ptr + at, grad_a.to(grad_a_ptr.dtype.element_ty), mask=mask)
        if grad_qkv_ptr is not None:
            grad_gates_ptr += part * 2 * HEADS
            tl.store(grad_gates_ptr + head, grad_a_log, mask=head < HEADS)
            tl.store(grad_gates_ptr + HEADS + head, grad_dt_bias, mask=head < HEADS)
    else:
        channel, columns, length = program * KEY_DIM, KEY_DIM, KEY_HEADS * KEY_DIM
        if program < KEY_HEADS:
            own_ptr = q_ptr + channel
        elif program < 2 * KEY_HEADS:
            own_ptr = k_ptr + channel - KEY_HEADS * KEY_DIM
        else:
            own = (program - 2 * KEY_HEADS) * VALUE_DIM
            channel, columns, length = own + keys, VALUE_DIM, HEADS * VALUE_DIM
            own_ptr = v_ptr + own
        column = tl.arange(0, WIDTH)
        wide = column < columns
        qkv_ptr += channel
        weight_ptr += channel * TAPS
        tap = tl.arange(0, WIDE_TAPS)
        sums = tl.zeros((WIDTH, WIDE_TAPS), tl.float32)
        # In backward the last rows are there for those before them.
        step: tl.constexpr = ROWS if grad_qkv_ptr is None else ROWS - TAPS + 1
        for tile in range(part, tl.cdiv(tokens, step), parts):
            token = tile * step + row
            start = _starts(cu_seqlens_ptr, token, documents)
            x = _convolved(qkv_ptr, qkv_token, weight_ptr, token, start, tokens, column, wide, TAPS)
            gate = tl.sigmoid(x)
            y = x * gate
            at = token.to(tl.int64)[:, None] * length + column[None, :]
            mask = (token < tokens)[:, None] & wide[None, :]
            if grad_qkv_ptr is None:
                if program < 2 * KEY_HEADS:
                    y *= tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
                tl.store(own_ptr + at, y.to(q_ptr.dtype.element_ty), mask=mask)
            else:
                grad = tl.load(own_ptr + at, mask=mask, other=0.0).to(tl.float32)
                if program < 2 * KEY_HEADS:
                    rstd = tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
                    normed = y * rstd
                    grad = rstd * (grad - normed * tl.sum(grad * normed, 1)[:, None])
                grad *= gate * (1.0 + x * (1.0 - gate))
                owned = (row < step)[:, None]
                grad_qkv = tl.zeros((ROWS, WIDTH), tl.float32)
                for ahead in tl.static_range(TAPS):
                    at_tap = weight_ptr + column * TAPS + TAPS - 1 - ahead
                    weight = tl.load(at_tap, mask=wide, other=0.0).to(tl.float32)
                    index = tl.minimum(row + ahead, ROWS - 1)[:, None]
                    index += tl.zeros_like(column)[None, :]
                    reads = (_starts(cu_seqlens_ptr, token + ahead, documents) == start)[:, None]
                    later = tl.where(reads, tl.gather(grad, index, 0), 0.0)
                    grad_qkv += later * weight[None, :]
                    x = _before(qkv_ptr, qkv_token, token, start, tokens, column, wide, ahead)
                    of_tap = (tap == TAPS - 1 - ahead).to(tl.float32)
                    sums += tl.sum(tl.where(owned, grad * x, 0.0), 0)[:, None] * of_tap[None, :]
                at = token.to(tl.int64)[:, None] * channels + channel + column[None, :]
                grad_qkv = grad_qkv.to(grad_qkv_ptr.dtype.element_ty)
                tl.store(grad_qkv_ptr + at, grad_qkv, mask=mask & owned)
        if grad_qkv_ptr is not None:
            grad_weight_ptr += (part.to(tl.int64) * channels + channel) * TAPS
            tap_at = column[:, None] * TAPS + tap[None, :]
            tl.store(grad_weight_ptr + tap_at, sums, mask=wide[:, None] & (tap < TAPS)[None, :])


def _launch(
    setting: Launch,
    parts: int,
    inputs: DeltaInputs,
    made: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
) -> None:
    """Launch the kernel, which writes q, k, v, g and beta, or reads their gradients there."""
    qkv, *tensors = inputs
    (key_heads, key_dim), (heads, value_dim) = made[0].shape[1:], made[2].shape[1:]
    gated_delta_inputs_kernel[(parts * (2 * key_heads + heads + 1),)](
        *(*strided(qkv), *(x.contiguous() for x in tensors)),
        *(*made, *grads, len(qkv), len(inputs.cu_seqlens) - 1, parts),
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        HEADS=heads,
        VALUE_DIM=value_dim,
        TAPS=inputs.weight.shape[1],
        WIDE_TAPS=triton.next_power_of_2(inputs.weight.shape[1]),
        ROWS=setting.rows,
        WIDTH=triton.next_power_of_2(max(key_dim, value_dim)),
        GATES=triton.next_power_of_2(heads),
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )


def gated_delta_inputs_forward(
    inputs: DeltaInputs, key_heads: int, key_dim: int
) -> tuple[Tensor, ...]:
    """Launch the kernel for `reference.gated_delta_inputs_forward`."""
    qkv, heads = inputs.qkv, len(inputs.a_log)
    tokens, values = len(qkv), len(inputs.weight) - 2 * key_heads * key_dim
    q, k = (qkv.new_empty(tokens, key_heads, key_dim) for _ in "qk")
    v = qkv.new_empty(tokens, heads, values // heads)
    g, beta = (qkv.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2))
    made = q, k, v, g, beta
    if tokens:
        setting = launch(INPUTS, key_dim)
        _launch(setting, cdiv(tokens, setting.rows), inputs, made, (None,) * 5)
    return made


def gated_delta_inputs_backward(
    inputs: DeltaInputs, grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Launch the kernels for `reference.gated_delta_inputs_backward`."""
    qkv, b, a, weight, a_log, dt_bias, _ = inputs
    tokens, heads = len(qkv), len(a_log)
    setting = launch(INPUTS_BACKWARD, grads[0].shape[2])
    parts = min(cdiv(tokens, setting.rows - weight.shape[1] + 1), MOST_PARTS)
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (qkv, b, a)]
    grad_weight = weight.new_empty(parts, weight.numel(), dtype=torch.float32)
    grad_gates = weight.new_empty(parts, 2 * heads, dtype=torch.float32)
    if parts:
        given = tuple(x.contiguous() for x in grads)
        _launch(setting, parts, inputs, given, (*made, grad_weight, grad_gates))
    (weights,) = column_sums(grad_weight, [weight.dtype])
    grad_a_log, grad_dt_bias = column_sums(grad_gates, [a_log.dtype, dt_bias.dtype])
    return *made, weights.view(weight.shape), grad_a_log, grad_dt_bias
