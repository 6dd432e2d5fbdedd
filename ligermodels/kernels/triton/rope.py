"""RoPE and its gradient, one launch each: rotate q and k, and copy what is not rotated."""

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, keywords, launch

# Both kernels use these configs. A row is all pairs of the query heads of a token.
ROPE = Launches(
    nvidia=((512, Launch(512, 1)), (None, Launch(1024, 4))),
    amd=Launch(1024, 4),
)


@triton.jit
def _rotate(
    from_ptr,
    head_stride,
    to_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate the first 2 * HALF elements of each head. The elements of pair i are b - a apart."""
    step: tl.constexpr = 2 if INTERLEAVED else 1
    apart: tl.constexpr = 1 if INTERLEAVED else HALF
    pairs = heads * HALF
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mask = pair < pairs
        head = pair // HALF
        column = pair % HALF
        source = from_ptr + head.to(tl.int64) * head_stride + column * step
        target = to_ptr + head * HEAD_DIM + column * step
        cos = tl.load(cos_ptr + column, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if INVERSE:
            sin = -sin
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + apart, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (a * cos - b * sin).to(to_ptr.dtype.element_ty), mask=mask)
        tl.store(target + apart, (b * cos + a * sin).to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy(
    from_ptr,
    head_stride,
    to_ptr,
    heads,
    START: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the elements of each head from START on."""
    width: tl.constexpr = HEAD_DIM - START
    for start in range(0, heads * width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < heads * width
        head = at // width
        column = START + at % width
        source = from_ptr + head.to(tl.int64) * head_stride + column
        tl.store(to_ptr + head * HEAD_DIM + column, tl.load(source, mask=mask), mask=mask)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    seq,
    q_batch_stride,
    q_seq_stride,
    q_head_stride,
    k_batch_stride,
    k_seq_stride,
    k_head_stride,
    v_batch_stride,
    v_seq_stride,
    v_head_stride,
    cos_batch_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles all heads of one token. If IN_PLACE is set, it only rotates.

    If k and v are None, q has packed rows, with the heads of all three.
    """
    # A division of 32 bits: one of 64 takes many instructions and registers.
    token = tl.program_id(0)
    batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    token = token.to(tl.int64)
    cos_row = batch * cos_batch_stride + position * HALF
    cos_ptr += cos_row
    sin_ptr += cos_row
    out_ptr += token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q_ptr += batch * q_batch_stride + position * q_seq_stride
    first: tl.constexpr = HEADS + KV_HEADS if k_ptr is None else HEADS
    if k_ptr is None:
        q_head_stride = HEAD_DIM
        v_ptr = q_ptr + first * HEAD_DIM
        v_head_stride = HEAD_DIM
    else:
        k_ptr += batch * k_batch_stride + position * k_seq_stride
        v_ptr += batch * v_batch_stride + position * v_seq_stride
    for of_k in tl.static_range(1 if k_ptr is None else 2):
        x_ptr = k_ptr if of_k else q_ptr
        head_stride = k_head_stride if of_k else q_head_stride
        heads = KV_HEADS if of_k else first
        _rotate(
            x_ptr,
            head_stride,
            out_ptr,
            cos_ptr,
            sin_ptr,
            heads,
            INVERSE,
            HALF,
            HEAD_DIM,
            INTERLEAVED,
            BLOCK,
        )
        if not IN_PLACE and 2 * HALF < HEAD_DIM:
            _copy(x_ptr, head_stride, out_ptr, heads, 2 * HALF, HEAD_DIM, BLOCK)
        out_ptr += heads * HEAD_DIM
    if not IN_PLACE:
        _copy(v_ptr, v_head_stride, out_ptr, KV_HEADS, 0, HEAD_DIM, BLOCK)


def rope_forward(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    in_place: bool,
    interleaved: bool = False,
) -> Tensor:
    """Launch the kernel for `reference.rope_forward`."""
    assert qkv.is_contiguous() or not in_place
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    batch, seq, columns = qkv.shape
    out = qkv if in_place else qkv.new_empty((batch, seq, columns))
    if out.numel() == 0:
        return out
    strides = (*qkv.stride()[:2], *[0] * 7)  # those of heads are known
    heads = num_heads, num_kv_heads
    _launch((qkv, None, None), cos, sin, out, strides, heads, False, interleaved, in_place)
    return out


def rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """Launch the kernel for `reference.rope_backward`."""
    batch, seq, heads, head_dim = grad_q.shape
    kv_heads = grad_k.shape[2]
    grad = grad_q.new_empty((batch, seq, (heads + 2 * kv_heads) * head_dim))
    if grad.numel() == 0:
        return grad
    grads = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q, grad_k, grad_v))
    strides = tuple(stride for x in grads for stride in x.stride()[:3])
    _launch(grads, cos, sin, grad, strides, (heads, kv_heads), True, interleaved, False)
    return grad


def _launch(
    inputs: tuple[Tensor | None, ...],
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    strides: tuple[int, ...],
    heads: tuple[int, int],
    inverse: bool,
    interleaved: bool,
    in_place: bool,
) -> None:
    batch, seq, columns = out.shape
    half = cos.shape[-1]
    setting = launch(ROPE, heads[0] * half)
    rope_kernel[(batch * seq,)](
        *inputs,
        cos.contiguous(),
        sin.contiguous(),
        out,
        seq,
        *strides,
        0 if cos.shape[0] == 1 else seq * half,
        *heads,
        INVERSE=inverse,
        HALF=half,
        HEAD_DIM=columns // (heads[0] + 2 * heads[1]),
        INTERLEAVED=interleaved,
        IN_PLACE=in_place,
        **keywords(setting),
    )
