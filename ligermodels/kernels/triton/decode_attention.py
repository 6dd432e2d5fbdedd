"""Attention of few queries of each row: the keys are split over programs, whose parts are added."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch, num_sms

# `block` is how many keys a program reads at once, `rows` for how many queries at most, and
# `programs` how many there are for each multiprocessor. The tables are by the size of a head, for
# 16-bit caches of up to SHORT keys, for longer ones and for float32. Parts of few keys take longer
# to add than they save.
SHORT = 2048
_AMD = (
    (128, Launch(32, 4, rows=32, programs=4)),
    (256, Launch(16, 4, rows=32, programs=4)),
    (None, Launch(16, 4, num_stages=1, rows=16, programs=4)),
)
SPLIT_SHORT = Launches(
    nvidia=(
        (64, Launch(32, 4, num_stages=3, rows=64, programs=4)),
        (128, Launch(32, 4, rows=64, programs=3)),
        (256, Launch(32, 4, num_stages=3, rows=32, programs=1)),
        (None, Launch(32, 8, rows=16, programs=4)),
    ),
    amd=_AMD,
)
SPLIT = Launches(
    nvidia=(
        (64, Launch(32, 4, num_stages=3, rows=64, programs=4)),
        (128, Launch(64, 4, rows=64, programs=8)),
        (256, Launch(32, 4, num_stages=3, rows=32, programs=8)),
        (None, Launch(32, 8, rows=16, programs=4)),
    ),
    amd=_AMD,
)
SPLIT_WIDE = Launches(
    nvidia=(
        (64, Launch(32, 4, rows=32, programs=4)),
        (256, Launch(16, 4, rows=32, programs=4)),
        (None, Launch(16, 4, rows=16, programs=4)),
    ),
    amd=(
        (256, Launch(16, 4, rows=16, programs=4)),
        (None, Launch(16, 4, num_stages=1, rows=16, programs=4)),
    ),
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEAST_ROWS = 16  # of each operand of tl.dot


@triton.jit
def _add_keys(q, k, v, visible, highest, total, out, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Add some keys to the sums of an online softmax, and return its maximum and its sums."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / softcap))))
    scores = tl.where(visible, scores * LOG2_E, -float("inf"))
    new = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(new == -float("inf"), 0.0, new)
    share = tl.exp2(scores - shift[:, None])
    fall = tl.exp2(highest - shift)
    total = total * fall + tl.sum(share, 1)
    out = out * fall[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return new, total, out


@triton.jit
def decode_attention_kernel(
    q_ptr,
    q_row,
    q_head,
    q_token,
    new_k_ptr,
    new_k_row,
    new_k_head,
    new_k_token,
    new_v_ptr,
    new_v_row,
    new_v_head,
    new_v_token,
    k_ptr,
    v_ptr,
    ends_ptr,
    firsts_ptr,
    sinks_ptr,
    out_ptr,
    stats_ptr,
    heads,
    slots,
    window,
    scale,
    softcap,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    NEW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one part of the keys of one key head, for up to ROWS queries.

    These are of the QUERIES last tokens and the GROUP heads that share the keys. The parts of the
    rows have equal lengths, of the keys that there are. With stats_ptr, the program writes its part
    of the sum in float32, and the maximum of the scores (base 2) and the sum of their powers;
    without, it has all keys and writes the output. The first part begins with the sinks, if there
    are any, as the scores of keys without values. With NEW 0, there is one new token at most: the
    program whose part has its slot puts it among the keys of the cache. Otherwise the program of
    the last part adds the new tokens first. Nobody reads them in the cache, and one writes them.
    """
    tiles: tl.constexpr = (GROUP * QUERIES + ROWS - 1) // ROWS
    row, pair = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, tile = pair // tiles, pair % tiles
    part, parts = tl.program_id(0), tl.num_programs(0)
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    column = tl.arange(0, WIDTH)
    member = tile * ROWS + tl.arange(0, ROWS)  # heads x queries
    wide = column < HEAD_DIM
    mine = member < GROUP * QUERIES

    end = tl.load(ends_ptr + row)
    last = end - 1
    padding = tl.cast(0, tl.int64)
    if firsts_ptr is not None:
        padding = tl.load(firsts_ptr + row)
    lowest = padding  # the first key that any query sees
    if HAS_WINDOW:
        lowest = tl.maximum(padding, end - (QUERIES - 1) - window)
    # While a row is not longer than the cache, its tokens stand in order.
    first = tl.where(end <= slots, tl.maximum(lowest, 0), 0)
    stop = tl.minimum(end, slots)
    size = tl.cdiv(tl.cdiv(stop - first, parts), BLOCK) * BLOCK
    first += part * size
    stop = tl.minimum(stop, first + size)

    q_ptr += row * q_row + head * GROUP * q_head
    q_at = (member // QUERIES)[:, None] * q_head + (member % QUERIES)[:, None] * q_token
    q = tl.load(q_ptr + q_at + column[None, :], mask=mine[:, None] & wide[None, :], other=0.0)
    buffer = (row * (heads // GROUP) + head) * slots * HEAD_DIM
    k_ptr += buffer
    v_ptr += buffer
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None and part == 0:
        sinks = tl.load(sinks_ptr + head * GROUP + member // QUERIES, mask=mine, other=0.0)
        highest = sinks.to(tl.float32) * LOG2_E
        total += 1.0
    out = tl.zeros((ROWS, WIDTH), tl.float32)

    new_slot = last % slots
    own = last - (QUERIES - 1) + member % QUERIES  # the position of each query
    if new_k_ptr is not None:
        dtype = k_ptr.dtype.element_ty
        new_k_ptr += row * new_k_row + head * new_k_head
        new_v_ptr += row * new_v_row + head * new_v_head
        if NEW == 0:
            new_k = tl.load(new_k_ptr + column, mask=wide, other=0.0).to(dtype)
            new_v = tl.load(new_v_ptr + column, mask=wide, other=0.0).to(dtype)
            if (new_slot >= first) & (new_slot < stop) & (tile == 0):
                tl.store(k_ptr + new_slot * HEAD_DIM + column, new_k, mask=wide)
                tl.store(v_ptr + new_slot * HEAD_DIM + column, new_v, mask=wide)
        elif part == parts - 1:
            token = tl.arange(0, NEW).to(tl.int64)
            given = (token < QUERIES)[:, None] & wide[None, :]
            k_at = token[:, None] * new_k_token + column[None, :]
            v_at = token[:, None] * new_v_token + column[None, :]
            new_k = tl.load(new_k_ptr + k_at, mask=given, other=0.0).to(dtype)
            new_v = tl.load(new_v_ptr + v_at, mask=given, other=0.0).to(dtype)
            position = last - (QUERIES - 1) + token
            at = (position % slots)[:, None] * HEAD_DIM + column[None, :]
            tl.store(k_ptr + at, new_k, mask=given & (tile == 0))
            tl.store(v_ptr + at, new_v, mask=given & (tile == 0))
            seen = (position[None, :] <= own[:, None]) & (position[None, :] >= padding)
            if HAS_WINDOW:
                seen &= position[None, :] > own[:, None] - window
            highest, total, out = _add_keys(
                q, new_k, new_v, seen, highest, total, out, scale, softcap, HAS_SOFTCAP
            )

    for start in range(first, stop, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        there = slot < stop
        position = last - (last - slot) % slots
        visible = (there & (position >= lowest))[None, :]
        is_old = there
        if QUERIES > 1:
            visible &= position[None, :] <= own[:, None]
            if HAS_WINDOW:
                visible &= position[None, :] > own[:, None] - window
        if new_k_ptr is not None and NEW == 0:
            is_old = there & (slot != new_slot)
        elif new_k_ptr is not None:
            is_old = there & (position <= last - QUERIES)
            visible &= is_old[None, :]
        at = slot[:, None] * HEAD_DIM + column[None, :]
        read = is_old[:, None] & wide[None, :]
        k = tl.load(k_ptr + at, mask=read, other=0.0)
        v = tl.load(v_ptr + at, mask=read, other=0.0)
        if NEW == 0 and new_k_ptr is not None:
            is_new = (slot == new_slot)[:, None]
            k = tl.where(is_new, new_k[None, :], k)
            v = tl.where(is_new, new_v[None, :], v)
        highest, total, out = _add_keys(
            q, k, v, visible, highest, total, out, scale, softcap, HAS_SOFTCAP
        )

    written = mine[:, None] & wide[None, :]
    if stats_ptr is None:
        out_ptr += (row * heads + head * GROUP) * QUERIES * HEAD_DIM
        out = out / total[:, None]
        out_at = member[:, None] * HEAD_DIM + column[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=written)
    else:
        # (batch, heads, queries, parts, ...)
        index = ((row * heads + head * GROUP) * QUERIES + member) * parts + part
        tl.store(out_ptr + index[:, None] * HEAD_DIM + column[None, :], out, mask=written)
        tl.store(stats_ptr + 2 * index, highest, mask=mine)
        tl.store(stats_ptr + 2 * index + 1, total, mask=mine)


@triton.jit
def join_kernel(
    part_ptr,
    stats_ptr,
    out_ptr,
    parts,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds the parts of one query of one head of one row."""
    query = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    there, wide = part < parts, column < HEAD_DIM
    index = query * parts + part
    highest = tl.load(stats_ptr + 2 * index, mask=there, other=-float("inf"))
    total = tl.load(stats_ptr + 2 * index + 1, mask=there, other=0.0)
    share = tl.exp2(highest - tl.max(highest))
    at = index[:, None] * HEAD_DIM + column[None, :]
    x = tl.load(part_ptr + at, mask=there[:, None] & wide[None, :], other=0.0)
    out = tl.sum(x * share[:, None], 0) / tl.sum(total * share)
    tl.store(out_ptr + query * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=wide)


def decode_attention_forward(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    firsts: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Launch the kernels for `reference.decode_attention_forward`."""
    batch, heads, queries, head_dim = q.shape
    kv_heads, slots = k.shape[1:3]
    assert k.is_contiguous() and v.is_contiguous(), "a cache's buffers are contiguous"
    q = q if q.stride(-1) == 1 else q.contiguous()
    new_k = new_v = None
    if new is not None:
        new_k, new_v = (x if x.stride(-1) == 1 else x.contiguous() for x in new)
    out = q.new_empty(batch, heads, queries, head_dim)
    if out.numel() == 0:
        return out
    keys = slots if window is None else min(slots, window + queries - 1)
    table = SPLIT_WIDE if q.element_size() > 2 else SPLIT if keys > SHORT else SPLIT_SHORT
    setting = launch(table, head_dim)
    group = heads // kv_heads
    rows = min(setting.rows, max(LEAST_ROWS, triton.next_power_of_2(group * queries)))
    pairs = kv_heads * cdiv(group * queries, rows)
    most = cdiv(setting.programs * num_sms(q.device), batch * pairs)
    parts = max(1, min(most, cdiv(keys, setting.block), 128))
    # One new key takes its place among the keys of the cache; where rows are long, that spills
    # registers.
    apart = queries > 1 or q.element_size() > 2 or head_dim > 256
    target, stats = out, None
    if parts > 1:
        target = out.new_empty((batch, heads, queries, parts, head_dim), dtype=torch.float32)
        stats = out.new_empty((batch, heads, queries, parts, 2), dtype=torch.float32)
    decode_attention_kernel[(parts, pairs, batch)](
        q,
        *q.stride()[:3],
        new_k,
        *((0, 0, 0) if new_k is None else new_k.stride()[:3]),
        new_v,
        *((0, 0, 0) if new_v is None else new_v.stride()[:3]),
        k,
        v,
        ends,
        firsts,
        sinks,
        target,
        stats,
        heads,
        slots,
        window or 0,
        scale,
        softcap or 1.0,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        GROUP=group,
        QUERIES=queries,
        ROWS=rows,
        NEW=max(LEAST_ROWS, triton.next_power_of_2(queries)) if apart else 0,
        HEAD_DIM=head_dim,
        WIDTH=max(LEAST_ROWS, triton.next_power_of_2(head_dim)),
        **keywords(setting),
    )
    if stats is not None:
        join_kernel[(batch * heads * queries,)](
            target,
            stats,
            out,
            parts,
            HEAD_DIM=head_dim,
            PARTS=triton.next_power_of_2(parts),
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=1,
            num_stages=2,
        )
    return out
