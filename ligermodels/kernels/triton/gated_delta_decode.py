"""The gated delta rule for few tokens: a launch for its convolution, and one for all else."""

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, launch, strided
from ligermodels.kernels.triton.gated_delta_inputs import EPS, _softplus

# By the size of a head's state.
CONVOLVE = Launches(nvidia=((None, Launch(0, 1)),), amd=((None, Launch(0, 1)),))
UPDATE = Launches(nvidia=((4096, Launch(0, 2)), (None, Launch(0, 8))), amd=((None, Launch(0, 8)),))


@triton.jit
def _row(rows_ptr, qkv_ptr, qkv_token, token, past, channels, wide):
    """Load a row of qkv, or for a negative token one of those before."""
    before = tl.load(rows_ptr + (token + past) * channels, mask=wide & (token < 0), other=0.0)
    at = tl.cast(token, tl.int64) * qkv_token
    now = tl.load(qkv_ptr + at, mask=wide & (token >= 0), other=0.0)
    return tl.where(token < 0, before, now)


@triton.jit
def gated_delta_convolve_kernel(
    qkv_ptr,
    qkv_row,
    qkv_token,
    weight_ptr,
    rows_ptr,
    out_ptr,
    tokens,
    key_heads,
    heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program handles the channels of one head of q, k or v, and their part of the rows."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    past: tl.constexpr = TAPS - 1
    channels = tl.cast(2 * key_heads * KEY_DIM + heads * VALUE_DIM, tl.int64)
    channel, columns = head * KEY_DIM, KEY_DIM
    if head >= 2 * key_heads:
        channel = 2 * key_heads * KEY_DIM + (head - 2 * key_heads) * VALUE_DIM
        columns = VALUE_DIM
    column = channel + tl.arange(0, WIDTH)
    wide = tl.arange(0, WIDTH) < columns
    qkv_ptr += row * qkv_row + column
    rows_ptr += row * past * channels + column
    out_ptr += row * tokens * channels + column
    for token in range(tokens):
        x = tl.zeros((WIDTH,), tl.float32)
        for tap in tl.static_range(TAPS):
            read = _row(rows_ptr, qkv_ptr, qkv_token, token - past + tap, past, channels, wide)
            weight = tl.load(weight_ptr + column * TAPS + tap, mask=wide, other=0.0)
            x += read.to(tl.float32) * weight.to(tl.float32)
        x *= tl.sigmoid(x)
        if head < 2 * key_heads:
            x *= tl.rsqrt(tl.sum(x * x, 0) + EPS)
        tl.store(out_ptr + token * channels, x.to(out_ptr.dtype.element_ty), mask=wide)
    for tap in tl.static_range(past):
        read = _row(rows_ptr, qkv_ptr, qkv_token, tokens - past + tap, past, channels, wide)
        tl.store(rows_ptr + tap * channels, read, mask=wide)


@triton.jit
def gated_delta_update_kernel(
    qkv_ptr,
    z_ptr,
    z_row,
    z_token,
    b_ptr,
    b_row,
    b_token,
    a_ptr,
    a_row,
    a_token,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    memory_ptr,
    out_ptr,
    tokens,
    key_heads,
    heads,
    scale,
    eps,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Each program handles the state of one value head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    scale, eps = tl.cast(scale, tl.float32), tl.cast(eps, tl.float32)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    memory_ptr += (row * heads + head) * (KEY_DIM * VALUE_DIM)
    at = key[:, None] * VALUE_DIM + value[None, :]
    inside = is_key[:, None] & is_value[None, :]
    memory = tl.load(memory_ptr + at, mask=inside, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + value, mask=is_value, other=0.0).to(tl.float32)
    key_head = head // (heads // key_heads)
    for index in range(tokens):
        token = tl.cast(index, tl.int64)
        values = 2 * key_heads * KEY_DIM
        qkv = qkv_ptr + (row * tokens + token) * (values + heads * VALUE_DIM)
        q = tl.load(qkv + key_head * KEY_DIM + key, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(qkv + (key_heads + key_head) * KEY_DIM + key, mask=is_key, other=0.0)
        k = k.to(tl.float32)
        v = tl.load(qkv + values + head * VALUE_DIM + value, mask=is_value, other=0.0)
        a = tl.load(a_ptr + row * a_row + token * a_token + head).to(tl.float32)
        beta = tl.sigmoid(tl.load(b_ptr + row * b_row + token * b_token + head).to(tl.float32))
        memory *= tl.exp(-rate * _softplus(a + dt_bias))
        change = beta * (v.to(tl.float32) - tl.sum(memory * k[:, None], 0))
        memory += k[:, None] * change[None, :]
        out = tl.sum(memory * q[:, None], 0) * scale
        out *= tl.rsqrt(tl.sum(out * out, 0) / VALUE_DIM + eps) * norm
        z = tl.load(
            z_ptr + row * z_row + token * z_token + head * VALUE_DIM + value,
            mask=is_value,
            other=0.0,
        ).to(tl.float32)
        out *= z * tl.sigmoid(z)
        to = out_ptr + ((row * tokens + token) * heads + head) * VALUE_DIM + value
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_value)
    tl.store(memory_ptr + at, memory, mask=inside)


def gated_delta_decode_forward(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: tuple[Tensor, ...],
    state: tuple[Tensor, Tensor],
    key_heads: int,
    key_dim: int,
    eps: float,
) -> Tensor:
    """Launch the kernels for `reference.gated_delta_decode_forward`."""
    (weight, *others), (rows, memory) = (x.contiguous() for x in weights), state
    (batch, seq, _), (heads, _, width) = qkv.shape, memory.shape[1:]
    convolved, out = qkv.new_empty(qkv.shape), z.new_empty(z.shape)
    if out.numel() == 0:
        return out
    keys, values = triton.next_power_of_2(key_dim), triton.next_power_of_2(width)
    sizes = {"KEY_DIM": key_dim, "VALUE_DIM": width}
    setting = launch(CONVOLVE, max(keys, values))
    gated_delta_convolve_kernel[(batch, 2 * key_heads + heads)](
        *(*strided(qkv), weight, rows, convolved, seq, key_heads, heads),
        TAPS=weight.shape[1],
        WIDTH=max(keys, values),
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
        **sizes,
    )
    setting = launch(UPDATE, keys * values)
    gated_delta_update_kernel[(batch, heads)](
        *(convolved, *strided(z, b, a), *others, memory, out),
        *(seq, key_heads, heads, key_dim**-0.5, eps),
        KEYS=keys,
        VALUES=values,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
        **sizes,
    )
    return out
