"""RMS norm and rotation of the heads of q and k: one launch in forward, one or two in backward.

The second launch of backward is small and sums the gradients of the weights. A program handles
tiles of (heads, pairs). A pair has an element a and an element b, which are half of what is rotated
apart. The elements after those are paired in the same way, and are not rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.checks import NormOptions
from ligermodels.kernels.launch import Launch, Launches, launch, num_programs
from ligermodels.kernels.triton.column_sums import column_sums

# A row is the pairs of one head. A block has as many heads as fit.
FORWARD = Launches(nvidia=((64, Launch(512, 4)), (None, Launch(1024, 2))), amd=Launch(512, 4))
BACKWARD = Launches(
    nvidia=((64, Launch(512, 1, programs=8)), (None, Launch(512, 2, programs=8))),
    amd=Launch(512, 4, programs=8),
)


@triton.jit
def _pairs(column, HALF: tl.constexpr, TURNED: tl.constexpr):
    """Return the places of a and b in a head, of which the first TURNED pairs are rotated."""
    if TURNED == HALF:
        return column, column + HALF
    turns = column < TURNED
    return column + tl.where(turns, 0, TURNED), column + tl.where(turns, TURNED, HALF)


@triton.jit
def _weights(ptr, HALF: tl.constexpr, TURNED: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load a weight as float32, a and b of its pairs."""
    column = tl.arange(0, BLOCK_HALF)[None, :]
    mask = column < HALF
    at_a, at_b = _pairs(column, HALF, TURNED)
    a = tl.load(ptr + at_a, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptr + at_b, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _normed(
    x_ptr,
    head_stride,
    head,
    mask,
    column,
    eps,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """Return a and b of normalised heads, the same rounded if LLAMA is set, and 1 / rms."""
    at = head.to(tl.int64) * head_stride
    at_a, at_b = _pairs(column, HALF, TURNED)
    a = tl.load(x_ptr + at + at_a, mask=mask, other=0.0)
    b = tl.load(x_ptr + at + at_b, mask=mask, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(a * a + b * b, 1, keep_dims=True) / (2 * HALF) + eps)
    a, b = a * rstd, b * rstd
    rounded_a, rounded_b = a, b
    if LLAMA:
        rounded_a, rounded_b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    return a, b, rounded_a, rounded_b, rstd


@triton.jit
def qk_norm_rope_forward_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
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
    cos_batch_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    LLAMA: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Each program handles all heads of one token."""
    # torch.compile passes Python floats as float64.
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    # A division of 32 bits: one of 64 takes many instructions and registers.
    token = tl.program_id(0)
    batch, position = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    token = token.to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    angle = batch * cos_batch_stride + position * TURNED + column
    cos = tl.load(cos_ptr + angle, mask=column < TURNED, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=column < TURNED, other=0.0).to(tl.float32)
    out_ptr += token * ((HEADS + KV_HEADS) * 2 * HALF)
    for of_k in tl.static_range(2):
        if of_k:
            x_ptr = k_ptr + batch * k_batch_stride + position * k_seq_stride
            head_stride, weight_ptr = k_head_stride, k_weight_ptr
        else:
            x_ptr = q_ptr + batch * q_batch_stride + position * q_seq_stride
            head_stride, weight_ptr = q_head_stride, q_weight_ptr
        heads = KV_HEADS if of_k else HEADS
        weight_a, weight_b = _weights(weight_ptr, HALF, TURNED, BLOCK_HALF)
        weight_a, weight_b = weight_a + offset, weight_b + offset
        for start in range(0, heads, BLOCK_HEADS):
            head = start + tl.arange(0, BLOCK_HEADS)[:, None]
            mask = (head < heads) & (column < HALF)
            _, _, a, b, _ = _normed(
                x_ptr, head_stride, head, mask, column, eps, HALF, TURNED, LLAMA
            )
            a, b = a * weight_a, b * weight_b
            at_a, at_b = _pairs(column, HALF, TURNED)
            to = out_ptr + head * (2 * HALF)
            dtype = out_ptr.dtype.element_ty
            tl.store(to + at_a, (a * cos - b * sin).to(dtype), mask=mask)
            tl.store(to + at_b, (b * cos + a * sin).to(dtype), mask=mask)
        out_ptr += HEADS * 2 * HALF


@triton.jit
def qk_norm_rope_backward_kernel(
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    grad_qkv_ptr,
    partial_ptr,
    tokens,
    seq,
    grad_q_batch_stride,
    grad_q_seq_stride,
    grad_q_head_stride,
    grad_k_batch_stride,
    grad_k_seq_stride,
    grad_k_head_stride,
    grad_v_batch_stride,
    grad_v_seq_stride,
    grad_v_head_stride,
    q_batch_stride,
    q_seq_stride,
    q_head_stride,
    k_batch_stride,
    k_seq_stride,
    k_head_stride,
    cos_batch_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GATES: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    LLAMA: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Each program handles all heads of many tokens and sums their part of the weight gradients.

    It writes the sums to partial, which may be None. With GATES, as many as HEADS or 0, a gate
    follows each head of q in grad_qkv.
    """
    # torch.compile passes Python floats as float64.
    eps, offset = tl.cast(eps, tl.float32), tl.cast(offset, tl.float32)
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    grad_q_weight_a = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    grad_q_weight_b = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    grad_k_weight_a = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    grad_k_weight_b = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    for index in range(program, tokens, tl.num_programs(0)):
        batch, position = tl.cast(index // seq, tl.int64), tl.cast(index % seq, tl.int64)
        token = tl.cast(index, tl.int64)
        angle = batch * cos_batch_stride + position * TURNED + column
        cos = tl.load(cos_ptr + angle, mask=column < TURNED, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=column < TURNED, other=0.0).to(tl.float32)
        to = grad_qkv_ptr + token * ((GATES + HEADS + 2 * KV_HEADS) * 2 * HALF)
        for of_k in tl.static_range(2):
            if of_k:
                x_ptr = k_ptr + batch * k_batch_stride + position * k_seq_stride
                at_ptr = grad_k_ptr + batch * grad_k_batch_stride + position * grad_k_seq_stride
                x_head_stride, grad_head_stride = k_head_stride, grad_k_head_stride
                weight_ptr = k_weight_ptr
            else:
                x_ptr = q_ptr + batch * q_batch_stride + position * q_seq_stride
                at_ptr = grad_q_ptr + batch * grad_q_batch_stride + position * grad_q_seq_stride
                x_head_stride, grad_head_stride = q_head_stride, grad_q_head_stride
                weight_ptr = q_weight_ptr
            heads = KV_HEADS if of_k else HEADS
            width = 2 * HALF if of_k or GATES == 0 else 4 * HALF
            # Load the weights from the cache for each token. In registers they would cause spills.
            weight_a, weight_b = _weights(weight_ptr, HALF, TURNED, BLOCK_HALF)
            weight_a, weight_b = weight_a + offset, weight_b + offset
            for start in range(0, heads, BLOCK_HEADS):
                head = start + tl.arange(0, BLOCK_HEADS)[:, None]
                mask = (head < heads) & (column < HALF)
                a, b, rounded_a, rounded_b, rstd = _normed(
                    x_ptr, x_head_stride, head, mask, column, eps, HALF, TURNED, LLAMA
                )
                at_a, at_b = _pairs(column, HALF, TURNED)
                at = at_ptr + head.to(tl.int64) * grad_head_stride
                turned_a = tl.load(at + at_a, mask=mask, other=0.0).to(tl.float32)
                turned_b = tl.load(at + at_b, mask=mask, other=0.0).to(tl.float32)
                grad_a = turned_a * cos + turned_b * sin
                grad_b = turned_b * cos - turned_a * sin
                if partial_ptr is not None:
                    if of_k:
                        grad_k_weight_a += grad_a * rounded_a
                        grad_k_weight_b += grad_b * rounded_b
                    else:
                        grad_q_weight_a += grad_a * rounded_a
                        grad_q_weight_b += grad_b * rounded_b
                grad_a, grad_b = grad_a * weight_a, grad_b * weight_b
                mean = tl.sum(grad_a * a + grad_b * b, 1, keep_dims=True) / (2 * HALF)
                at = to + head * width
                dtype = to.dtype.element_ty
                tl.store(at + at_a, ((grad_a - a * mean) * rstd).to(dtype), mask=mask)
                tl.store(at + at_b, ((grad_b - b * mean) * rstd).to(dtype), mask=mask)
            to += heads * width
        grad_v = grad_v_ptr + batch * grad_v_batch_stride + position * grad_v_seq_stride
        wide = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        for start in range(0, KV_HEADS, BLOCK_HEADS):
            head = start + tl.arange(0, BLOCK_HEADS)[:, None]
            mask = (head < KV_HEADS) & (wide < 2 * HALF)
            at = grad_v + head.to(tl.int64) * grad_v_head_stride + wide
            tl.store(to + head * (2 * HALF) + wide, tl.load(at, mask=mask, other=0.0), mask=mask)
    if partial_ptr is not None:
        at = partial_ptr + program.to(tl.int64) * (4 * HALF)
        pair = tl.arange(0, BLOCK_HALF)
        at_a, at_b = _pairs(pair, HALF, TURNED)
        tl.store(at + at_a, tl.sum(grad_q_weight_a, 0), mask=pair < HALF)
        tl.store(at + at_b, tl.sum(grad_q_weight_b, 0), mask=pair < HALF)
        tl.store(at + 2 * HALF + at_a, tl.sum(grad_k_weight_a, 0), mask=pair < HALF)
        tl.store(at + 2 * HALF + at_b, tl.sum(grad_k_weight_b, 0), mask=pair < HALF)


def _tile(setting: Launch, heads: int, half: int) -> tuple[int, int]:
    """Return the numbers of heads and of pairs in a tile. Both are powers of two."""
    block_half = 1 << (half - 1).bit_length()
    return min(1 << (heads - 1).bit_length(), max(1, setting.block // block_half)), block_half


def _with_whole_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def qk_norm_rope_forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    options: NormOptions,
) -> Tensor:
    """Launch the kernel for `reference.qk_norm_rope_forward`."""
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    out = q.new_empty((batch, seq, heads + kv_heads, head_dim))
    if out.numel() == 0:
        return out
    q, k = _with_whole_heads(q, k)
    cos, sin = cos.contiguous(), sin.contiguous()
    setting = launch(FORWARD, head_dim // 2)
    block_heads, block_half = _tile(setting, heads, head_dim // 2)
    qk_norm_rope_forward_kernel[(batch * seq,)](
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        cos,
        sin,
        out,
        seq,
        *q.stride()[:3],
        *k.stride()[:3],
        0 if cos.shape[0] == 1 else seq * cos.shape[-1],
        options.eps,
        options.offset,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        TURNED=cos.shape[-1],
        LLAMA=options.casting_mode == "llama",
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return out


def qk_norm_rope_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_gate: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    options: NormOptions,
    needs_weight_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the kernels for `reference.qk_norm_rope_backward`."""
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q_columns = (heads if grad_gate is None else 2 * heads) * head_dim
    grad_qkv = q.new_empty((batch, seq, q_columns + 2 * kv_heads * head_dim))
    if grad_gate is not None:
        grad_qkv[..., :q_columns].view(batch, seq, heads, 2, head_dim)[..., 1, :] = grad_gate
    tokens = batch * seq
    setting = launch(BACKWARD, head_dim // 2)
    programs = num_programs(setting, tokens, q.device)
    partial = None
    if needs_weight_grads:
        partial = q.new_empty((programs, 2 * head_dim), dtype=torch.float32)
    if tokens:
        grad_q, grad_k, grad_v, q, k = _with_whole_heads(grad_q, grad_k, grad_v, q, k)
        cos, sin = cos.contiguous(), sin.contiguous()
        block_heads, block_half = _tile(setting, heads, head_dim // 2)
        qk_norm_rope_backward_kernel[(programs,)](
            grad_q,
            grad_k,
            grad_v,
            q,
            k,
            q_weight.contiguous(),
            k_weight.contiguous(),
            cos,
            sin,
            grad_qkv,
            partial,
            tokens,
            seq,
            *grad_q.stride()[:3],
            *grad_k.stride()[:3],
            *grad_v.stride()[:3],
            *q.stride()[:3],
            *k.stride()[:3],
            0 if cos.shape[0] == 1 else seq * cos.shape[-1],
            options.eps,
            options.offset,
            HEADS=heads,
            KV_HEADS=kv_heads,
            GATES=0 if grad_gate is None else heads,
            HALF=head_dim // 2,
            TURNED=cos.shape[-1],
            LLAMA=options.casting_mode == "llama",
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            num_warps=setting.num_warps,
            num_stages=setting.num_stages,
        )
    if partial is None:
        return grad_qkv, None, None
    grad_q_weight, grad_k_weight = column_sums(partial, [q_weight.dtype, k_weight.dtype])
    return grad_qkv, grad_q_weight, grad_k_weight
