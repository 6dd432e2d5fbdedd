"""The gated delta rule for few tokens, with its convolution and gates, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, launch, strided
from ligermodels.kernels.triton.gated_delta_inputs import EPS, _softplus

# By the size of a head's state.
DECODE = Launches(nvidia=((4096, Launch(0, 2)), (None, Launch(0, 8))), amd=Launch(0, 8))


@triton.jit
def _load_rows(rows_ptr, x_ptr, x_token, token, past, channels, mask):
    """Load rows of qkv, or for negative tokens those before."""
    before = tl.load(rows_ptr + (token + past) * channels, mask=mask & (token < 0), other=0.0)
    now = tl.load(x_ptr + token.to(tl.int64) * x_token, mask=mask & (token >= 0), other=0.0)
    return tl.where(token < 0, before, now)


@triton.jit
def _convolved(rows_ptr, x_ptr, x_token, weight_ptr, token, channel, channels, mask, TAPS):
    tap = tl.arange(0, mask.shape[0])[:, None]
    at, past = channel[None, :], TAPS - 1
    read = _load_rows(rows_ptr + at, x_ptr + at, x_token, token - past + tap, past, channels, mask)
    weight = tl.load(weight_ptr + at * TAPS + tap, mask=mask, other=0.0)
    x = tl.sum(read.to(tl.float32) * weight.to(tl.float32), 0)
    return x * tl.sigmoid(x)


@triton.jit
def _shift(rows_ptr, x_ptr, x_token, tokens, channel, channels, mask, TAPS):
    """Keep the last rows. All threads have read the rows before one of them writes."""
    tap = tl.arange(0, mask.shape[0])[:, None]
    at, past = channel[None, :], TAPS - 1
    mask &= tap < past
    read = _load_rows(rows_ptr + at, x_ptr + at, x_token, tokens - past + tap, past, channels, mask)
    tl.debug_barrier()
    tl.store(rows_ptr + at + tap * channels, read, mask=mask)


@triton.jit
def gated_delta_decode_kernel(
    x_ptr,
    x_row,
    x_token,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    rows_ptr,
    memory_ptr,
    out_ptr,
    tokens,
    key_heads,
    heads,
    eps,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    WIDE_TAPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Each program handles the states of the value heads of one key head of one row."""
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    scale: tl.constexpr = KEY_DIM**-0.5
    eps = tl.cast(eps, tl.float32)
    past: tl.constexpr = TAPS - 1
    keys, group = key_heads * KEY_DIM, heads // key_heads
    channels = tl.cast(2 * keys + heads * VALUE_DIM, tl.int64)
    tap, key, value = tl.arange(0, WIDE_TAPS)[:, None], tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    of_keys, of_values = (tap < TAPS) & is_key[None, :], (tap < TAPS) & is_value[None, :]
    q_channel = key_head * KEY_DIM + key
    v_channel = 2 * keys + key_head * group * VALUE_DIM + value
    x_ptr += row * x_row
    b_ptr = x_ptr + channels + heads * VALUE_DIM
    rows_ptr += row * past * channels
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    inside = is_key[:, None] & is_value[None, :]
    for member in range(group):
        head = key_head * group + member
        at = memory_ptr + (row * heads + head) * (KEY_DIM * VALUE_DIM)
        at += key[:, None] * VALUE_DIM + value[None, :]
        memory = tl.load(at, mask=inside, other=0.0)
        rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        for index in range(tokens):
            token = tl.cast(index, tl.int64)
            q = _convolved(
                *(rows_ptr, x_ptr, x_token, weight_ptr, token, q_channel),
                *(channels, of_keys, TAPS),
            )
            k = _convolved(
                *(rows_ptr, x_ptr, x_token, weight_ptr, token, q_channel + keys),
                *(channels, of_keys, TAPS),
            )
            v = _convolved(
                *(rows_ptr, x_ptr, x_token, weight_ptr, token, v_channel + member * VALUE_DIM),
                *(channels, of_values, TAPS),
            )
            q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
            k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
            b = tl.load(b_ptr + token * x_token + head).to(tl.float32)
            a = tl.load(b_ptr + token * x_token + heads + head).to(tl.float32)
            memory *= tl.exp(-rate * _softplus(a + dt_bias))
            change = tl.sigmoid(b) * (v - tl.sum(memory * k[:, None], 0))
            memory += k[:, None] * change[None, :]
            out = tl.sum(memory * q[:, None], 0)
            out *= tl.rsqrt(tl.sum(out * out, 0) / VALUE_DIM + eps) * norm
            z_at = x_ptr + token * x_token + channels + head * VALUE_DIM + value
            z = tl.load(z_at, mask=is_value, other=0.0).to(tl.float32)
            out *= z * tl.sigmoid(z)
            to = out_ptr + ((row * tokens + token) * heads + head) * VALUE_DIM + value
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_value)
        tl.store(at, memory, mask=inside)
    _shift(rows_ptr, x_ptr, x_token, tokens, q_channel, channels, of_keys, TAPS)
    _shift(rows_ptr, x_ptr, x_token, tokens, q_channel + keys, channels, of_keys, TAPS)
    for member in range(group):
        channel = v_channel + member * VALUE_DIM
        _shift(rows_ptr, x_ptr, x_token, tokens, channel, channels, of_values, TAPS)


def gated_delta_decode_forward(
    projected: Tensor,
    weights: tuple[Tensor, ...],
    state: tuple[Tensor, Tensor],
    key_heads: int,
    key_dim: int,
    eps: float,
) -> Tensor:
    """Launch the kernel for `reference.gated_delta_decode_forward`."""
    (batch, seq, _), (heads, _, width) = projected.shape, state[1].shape[1:]
    out = projected.new_empty(batch, seq, heads * width)
    if out.numel() == 0:
        return out
    keys, values = triton.next_power_of_2(key_dim), triton.next_power_of_2(width)
    taps = weights[0].shape[1]
    setting = launch(DECODE, keys * values)
    gated_delta_decode_kernel[(batch, key_heads)](
        *(*strided(projected), *(x.contiguous() for x in weights), *state, out),
        *(seq, key_heads, heads, eps),
        KEY_DIM=key_dim,
        VALUE_DIM=width,
        TAPS=taps,
        WIDE_TAPS=triton.next_power_of_2(taps),
        KEYS=keys,
        VALUES=values,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return out
