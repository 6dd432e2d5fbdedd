"""Rotation of q and k, copy of v and packing: RoPE and its gradient, one launch per call."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.settings import launch


@triton.jit
def _rotate(
    from_ptr,
    head_stride,
    to_ptr,
    cos_ptr,
    sin_ptr,
    pairs,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mask = pair < pairs
        head = pair // HALF
        column = pair % HALF
        source = from_ptr + head.to(tl.int64) * head_stride + column
        target = to_ptr + head * (2 * HALF) + column
        cos = tl.load(cos_ptr + column, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if INVERSE:
            sin = -sin
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (a * cos - b * sin).to(to_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (b * cos + a * sin).to(to_ptr.dtype.element_ty), mask=mask)


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
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    COPY_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All heads of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    batch = token // seq
    position = token % seq
    cos_row = batch * cos_batch_stride + position * HALF
    cos_ptr += cos_row
    sin_ptr += cos_row
    out_ptr += token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    q_ptr += batch * q_batch_stride + position * q_seq_stride
    k_ptr += batch * k_batch_stride + position * k_seq_stride
    _rotate(q_ptr, q_head_stride, out_ptr, cos_ptr, sin_ptr, HEADS * HALF, INVERSE, HALF, BLOCK)
    out_ptr += HEADS * 2 * HALF
    _rotate(k_ptr, k_head_stride, out_ptr, cos_ptr, sin_ptr, KV_HEADS * HALF, INVERSE, HALF, BLOCK)
    if COPY_V:
        out_ptr += KV_HEADS * 2 * HALF
        v_ptr += batch * v_batch_stride + position * v_seq_stride
        for start in range(0, KV_HEADS * 2 * HALF, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < KV_HEADS * 2 * HALF
            head = (at // (2 * HALF)).to(tl.int64)
            value = tl.load(v_ptr + head * v_head_stride + at % (2 * HALF), mask=mask, other=0.0)
            tl.store(out_ptr + at, value, mask=mask)


def rope_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor | None,
    inverse: bool = False,
) -> Tensor:
    """`reference.rope_packed` on the GPU."""
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    in_place = out is not None
    if out is None:
        columns = (heads + 2 * kv_heads) * head_dim
        out = torch.empty((batch, seq, columns), dtype=q.dtype, device=q.device)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    else:
        assert out.is_contiguous()
    if out.numel() == 0:
        return out
    cos, sin = cos.contiguous(), sin.contiguous()
    setting = launch("rope", heads * head_dim // 2)
    rope_kernel[(batch * seq,)](
        q,
        k,
        v,
        cos,
        sin,
        out,
        seq,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        0 if cos.shape[0] == 1 else cos.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        INVERSE=inverse,
        COPY_V=not in_place,
        BLOCK=setting.block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return out
