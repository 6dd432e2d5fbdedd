"""Attention with heads of 257 to 512.

In forward, a program has whole rows of the output in its registers. In backward that would be three
such sums, and each would compute the scores again. So the weights and the slopes of the scores are
written in 16 bit, for as many queries at once as SCRATCH holds, and three products read them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch, strided

# `rows` and `block` are the sizes of a program's tile, of scores or of a gradient; `depth` is how
# much of the summed dimension a product reads at once. In forward 64 rows of 512 float32 sums take
# half of the registers of 8 warps. The rows and the depth of SUMS divide the rows and the block of
# SCORES, so that a program reads only tiles that have been written.
_AMD = Launch(32, 4, num_stages=1, rows=32, depth=32)
FORWARD = Launches(
    nvidia=Launch(64, 8, num_stages=1, rows=64), amd=Launch(16, 4, num_stages=1, rows=32)
)
DELTA = Launches(nvidia=Launch(0, 4, rows=8), amd=Launch(0, 4, rows=8))
SCORES = Launches(nvidia=Launch(128, 8, num_stages=4, rows=128, depth=64), amd=_AMD)
SUMS = Launches(nvidia=Launch(256, 8, num_stages=4, rows=128, depth=64), amd=_AMD)

TILE = 128  # the rows and the block of SCORES divide it
SCRATCH = 2**29  # bytes that backward takes for scores, if TILE queries do not need more

Ranges = tuple[Tensor, Tensor, Tensor, Tensor]
Ids = tuple[Tensor | None, Tensor | None]

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _start(axis: tl.constexpr, SIZE: tl.constexpr):
    """Return the first row or column of a program's tile, which is one of a tensor."""
    return (tl.program_id(axis).to(tl.int64) * SIZE).to(tl.int32)


@triton.jit
def _read(x_ptr, index, token, start, stop, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of x (len(index), WIDTH); outside of [start, stop) and HEAD_DIM they are 0."""
    column = tl.arange(0, WIDTH)
    at = x_ptr + index.to(tl.int64)[:, None] * token + column[None, :]
    there = ((index >= start) & (index < stop))[:, None]
    if HEAD_DIM == WIDTH:
        return tl.load(at, mask=there, other=0.0)
    else:
        return tl.load(at, mask=there & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _write(x, x_ptr, index, token, stop, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = x_ptr + index.to(tl.int64)[:, None] * token + column[None, :]
    shown = (index < stop)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(at, x.to(x_ptr.dtype.element_ty), mask=shown)


@triton.jit
def wide_attention_forward_kernel(
    q_ptr,
    q_row,
    q_head,
    q_token,
    k_ptr,
    k_row,
    k_head,
    k_token,
    v_ptr,
    v_row,
    v_head,
    v_token,
    out_ptr,
    lse_ptr,
    first_ptr,
    end_ptr,
    range_row,
    query_ids_ptr,
    key_ids_ptr,
    queries,
    keys,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program computes ROWS queries of a head, the last ones first: these see most keys."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    scale = tl.cast(scale, tl.float32) * LOG2_E
    query = start + tl.arange(0, ROWS)
    q_ptr += row * q_row + head * q_head
    k_ptr += row * k_row + head // GROUP * k_head
    v_ptr += row * v_row + head // GROUP * v_head
    out_ptr += (row * queries * heads + head) * HEAD_DIM
    lse_ptr += (row * heads + head) * queries
    first_ptr += row * range_row
    end_ptr += row * range_row
    if query_ids_ptr is not None:
        query_ids_ptr += row * queries
        key_ids_ptr += row * keys
        own = tl.load(query_ids_ptr + query, mask=query < queries, other=-2)
    first = tl.load(first_ptr + query, mask=query < queries, other=0)
    end = tl.load(end_ptr + query, mask=query < queries, other=0)
    lowest = tl.load(first_ptr + start) // BLOCK * BLOCK
    highest = tl.load(end_ptr + tl.minimum(start + ROWS, queries) - 1)

    q = _read(q_ptr, query, q_token, 0, queries, HEAD_DIM, WIDTH)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    share = tl.zeros((ROWS, BLOCK), v_ptr.dtype.element_ty)
    # The weights meet their values one turn later: then each half of the warps computes half of the
    # scores. If the second product followed in the same turn, both halves would compute all scores.
    for at in range(lowest, highest, BLOCK):
        key = at + tl.arange(0, BLOCK)
        k = _read(k_ptr, key, k_token, 0, keys, HEAD_DIM, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        v = _read(v_ptr, key - BLOCK, v_token, lowest, keys, HEAD_DIM, WIDTH)
        out = tl.dot(share, v, out, input_precision="ieee")
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
        if query_ids_ptr is not None:
            other = tl.load(key_ids_ptr + key, mask=key < keys, other=-3)
            visible &= other[None, :] == own[:, None]
        scores = tl.where(visible, scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(scores - shift[:, None])
        fall = tl.exp2(top - shift)
        total = total * fall + tl.sum(weights, 1)
        out = out * fall[:, None]
        share = weights.to(share.dtype)
        top = new
    key = lowest + (tl.cdiv(highest - lowest, BLOCK) - 1) * BLOCK + tl.arange(0, BLOCK)
    v = _read(v_ptr, key, v_token, lowest, keys, HEAD_DIM, WIDTH)
    out = tl.dot(share, v, out, input_precision="ieee")
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    _write(out, out_ptr, query, heads * HEAD_DIM, queries, HEAD_DIM, WIDTH)
    lse = (top + tl.log2(total)) / LOG2_E
    tl.store(lse_ptr + query, tl.where(total == 0.0, -float("inf"), lse), mask=query < queries)


@triton.jit
def wide_attention_delta_kernel(
    grad_ptr,
    grad_row,
    grad_head,
    grad_token,
    out_ptr,
    delta_ptr,
    queries,
    heads,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program computes the sums of grad * out for ROWS queries of a head."""
    query, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    head, row = row % heads, row // heads
    grad_ptr += row * grad_row + head * grad_head
    out_ptr += (row * queries * heads + head) * HEAD_DIM
    grad = _read(grad_ptr, query, grad_token, 0, queries, HEAD_DIM, WIDTH)
    out = _read(out_ptr, query, heads * HEAD_DIM, 0, queries, HEAD_DIM, WIDTH)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + (row * heads + head) * queries + query, delta, mask=query < queries)


@triton.jit
def _product(
    a_ptr,
    a_token,
    a_index,
    a_stop,
    b_ptr,
    b_token,
    b_index,
    b_stop,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a b^T (ROWS, BLOCK) of rows of a and of b; those from `stop` on count as 0."""
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    column = tl.arange(0, DEPTH)
    a_at = a_ptr + a_index.to(tl.int64)[:, None] * a_token + column[None, :]
    b_at = b_ptr + b_index.to(tl.int64)[:, None] * b_token + column[None, :]
    for at in range(0, HEAD_DIM, DEPTH):
        a_there, b_there = (a_index < a_stop)[:, None], (b_index < b_stop)[:, None]
        if HEAD_DIM % DEPTH != 0:
            a_there &= (at + column < HEAD_DIM)[None, :]
            b_there &= (at + column < HEAD_DIM)[None, :]
        a = tl.load(a_at + at, mask=a_there, other=0.0)
        b = tl.load(b_at + at, mask=b_there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def wide_attention_scores_kernel(
    grad_ptr,
    grad_row,
    grad_head,
    grad_token,
    q_ptr,
    q_row,
    q_head,
    q_token,
    k_ptr,
    k_row,
    k_head,
    k_token,
    v_ptr,
    v_row,
    v_head,
    v_token,
    lse_ptr,
    delta_ptr,
    weights_ptr,
    slopes_ptr,
    scratch_head,
    scratch_token,
    first_ptr,
    end_ptr,
    range_row,
    query_ids_ptr,
    key_ids_ptr,
    begin,
    queries,
    keys,
    heads,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program writes ROWS x BLOCK weights and slopes of the queries from `begin` on.

    It writes nothing where no query of the tile sees a key, because nobody reads that.
    """
    row = tl.program_id(2).to(tl.int64)
    head, row = row % heads, row // heads
    own_start, other_start = _start(1, ROWS), _start(0, BLOCK)
    start = begin + own_start
    query, key = start + tl.arange(0, ROWS), other_start + tl.arange(0, BLOCK)
    scale = tl.cast(scale, tl.float32) * LOG2_E
    first_ptr += row * range_row
    end_ptr += row * range_row
    stop = tl.minimum(start + ROWS, queries)
    if start >= queries:
        return
    if tl.load(first_ptr + start) >= other_start + BLOCK:
        return
    if tl.load(end_ptr + stop - 1) <= other_start:
        return
    q_ptr += row * q_row + head * q_head
    grad_ptr += row * grad_row + head * grad_head
    k_ptr += row * k_row + head // GROUP * k_head
    v_ptr += row * v_row + head // GROUP * v_head
    stats = (row * heads + head) * queries + query
    there = query < queries
    first = tl.load(first_ptr + query, mask=there, other=0)
    end = tl.load(end_ptr + query, mask=there, other=0)
    visible = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
    if query_ids_ptr is not None:
        own = tl.load(query_ids_ptr + row * queries + query, mask=there, other=-2)
        other = tl.load(key_ids_ptr + row * keys + key, mask=key < keys, other=-3)
        visible &= own[:, None] == other[None, :]
    scores = _product(
        q_ptr, q_token, query, queries, k_ptr, k_token, key, keys, ROWS, BLOCK, HEAD_DIM, DEPTH
    )
    lse = tl.load(lse_ptr + stats, mask=there, other=0.0) * LOG2_E
    weights = tl.where(visible, tl.exp2(scores * scale - lse[:, None]), 0.0)
    at = (row * heads + head) * scratch_head
    at += (own_start + tl.arange(0, ROWS)).to(tl.int64)[:, None] * scratch_token + key[None, :]
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty))
    slopes = _product(
        *(grad_ptr, grad_token, query, queries, v_ptr, v_token, key, keys),
        *(ROWS, BLOCK, HEAD_DIM, DEPTH),
    )
    delta = tl.load(delta_ptr + stats, mask=there, other=0.0)
    slopes = weights * (slopes - delta[:, None])
    tl.store(slopes_ptr + at, slopes.to(slopes_ptr.dtype.element_ty))


@triton.jit
def wide_attention_sums_kernel(
    scratch_ptr,
    scratch_head,
    scratch_token,
    x_ptr,
    x_row,
    x_head,
    x_token,
    out_ptr,
    first_ptr,
    end_ptr,
    range_row,
    begin,
    stop,
    other_begin,
    other_stop,
    tokens,
    heads,
    scale,
    TURNED: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program computes BLOCK columns of the gradients of ROWS tokens, from `begin` to `stop`.

    The tokens are queries, and sum what they have of the keys; or TURNED, keys or their values, and
    sum what the GROUP heads of queries that share them have. Of the others, those from other_begin
    to other_stop count. With ADD, the sums are added to what is there, without the scale.
    """
    row = tl.program_id(2).to(tl.int64)
    head, row = row % heads, row // heads
    own_start = _start(1, ROWS)
    start, last = begin + own_start, tl.minimum(begin + own_start + ROWS, stop) - 1
    scale = tl.cast(scale, tl.float32)
    column, depth = _start(0, BLOCK) + tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    wide = column < HEAD_DIM
    lowest = tl.maximum(tl.load(first_ptr + row * range_row + start) - other_begin, 0)
    lowest = lowest // DEPTH * DEPTH
    highest = tl.minimum(tl.load(end_ptr + row * range_row + last), other_stop) - other_begin
    blocks = tl.cdiv(tl.maximum(highest - lowest, 0), DEPTH)
    if ADD and blocks == 0:
        return
    own, token = own_start + tl.arange(0, ROWS), start + tl.arange(0, ROWS)
    members: tl.constexpr = GROUP if TURNED else 1
    scratch_ptr += (row * heads + head) * members * scratch_head
    if TURNED:
        scratch_ptr += depth.to(tl.int64)[:, None] * scratch_token + own[None, :]
        x_ptr += head * GROUP * x_head
    else:
        scratch_ptr += own.to(tl.int64)[:, None] * scratch_token + depth[None, :]
        x_ptr += head // GROUP * x_head
    x_ptr += row * x_row + column[None, :]
    at = ((row * tokens + token.to(tl.int64)) * heads + head)[:, None] * HEAD_DIM + column[None, :]
    shown = (token < stop)[:, None] & wide[None, :]
    if ADD:
        total = tl.load(out_ptr + at, mask=shown, other=0.0)
    else:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
    for index in range(members * blocks):
        if TURNED:
            member, block = (index // blocks).to(tl.int64), index % blocks
            first = lowest + block * DEPTH
            at_block = member * scratch_head + first.to(tl.int64) * scratch_token
            weights = tl.load(scratch_ptr + at_block)
            weights = tl.trans(weights)
            x_at = x_ptr + member * x_head
        else:
            first = lowest + index * DEPTH
            weights = tl.load(scratch_ptr + first)
            x_at = x_ptr
        other = other_begin + first + depth
        x_at += other.to(tl.int64)[:, None] * x_token
        x = tl.load(x_at, mask=(other < other_stop)[:, None] & wide[None, :], other=0.0)
        total = tl.dot(weights, x, total, input_precision="ieee")
    if not ADD:
        total *= scale
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=shown)


def _rows_apart(x: Tensor) -> int:
    """Return how many numbers the rows of x are apart, 0 if all have the same."""
    return x.stride(0) if len(x) > 1 else 0


def wide_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: Ranges, ids: Ids, scale: float
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.wide_attention_forward`."""
    (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    out = q.new_empty(batch, queries, heads, head_dim)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    if out.numel() == 0:
        return out.transpose(1, 2), lse
    setting = launch(FORWARD, head_dim)
    wide_attention_forward_kernel[(cdiv(queries, setting.rows), heads, batch)](
        *(*strided(q, k, v), out, lse, *ranges[:2], _rows_apart(ranges[0]), *ids),
        *(queries, keys, scale),
        GROUP=heads // kv_heads,
        ROWS=setting.rows,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        **keywords(setting),
    )
    return out.transpose(1, 2), lse


def wide_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Ranges,
    ids: Ids,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels for `reference.wide_attention_backward`."""
    (batch, heads, queries, head_dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    grad, q, k, v = strided(grad, q, k, v)[::4]  # once for all panels
    out = out.transpose(1, 2).contiguous()
    dq = torch.empty_like(out)
    if dq.numel() == 0 or keys == 0:
        return dq.zero_().transpose(1, 2), torch.zeros_like(k), torch.zeros_like(v)
    delta = torch.empty_like(lse)
    of_delta, of_scores, of_sums = (launch(table, head_dim) for table in (DELTA, SCORES, SUMS))
    wide_attention_delta_kernel[(cdiv(queries, of_delta.rows), batch * heads)](
        *(*strided(grad), out, delta, queries, heads),
        ROWS=of_delta.rows,
        HEAD_DIM=head_dim,
        WIDTH=of_delta.block,
        num_warps=of_delta.num_warps,
        num_stages=of_delta.num_stages,
    )
    padded = cdiv(keys, TILE) * TILE
    each = 2 * q.element_size() * batch * heads * padded  # bytes that a query takes
    panel = min(max(1, SCRATCH // (each * TILE)), cdiv(queries, TILE)) * TILE
    weights, slopes = (q.new_empty(batch * heads, panel, padded) for _ in range(2))
    whole = panel >= queries
    # Several panels are added in float32.
    make, dtype = (torch.empty, q.dtype) if whole else (torch.zeros, torch.float32)
    shape = batch, keys, kv_heads, head_dim
    dk, dv = (make(shape, dtype=dtype, device=q.device) for _ in range(2))
    strides = slopes.stride()[:2]

    def options(setting: Launch) -> dict[str, int]:
        common = {"GROUP": heads // kv_heads, "HEAD_DIM": head_dim}
        return {**common, "ROWS": setting.rows, "DEPTH": setting.depth, **keywords(setting)}

    def add_up(read: Tensor, x: Tensor, total: Tensor, factor: float, turned: bool) -> None:
        """Sum x, weighted with what has been written, over the keys of each query, or turned."""
        seen = ranges[2:] if turned else ranges[:2]
        own, other = ((0, keys), panel_tokens) if turned else (panel_tokens, (0, keys))
        tokens, count = total.shape[1:3]
        tiles = cdiv(head_dim, of_sums.block), cdiv(own[1] - own[0], of_sums.rows)
        wide_attention_sums_kernel[tiles + (batch * count,)](
            *(read, *strides, *strided(x), total, *seen, _rows_apart(seen[0])),
            *(*own, *other, tokens, count, factor),
            TURNED=turned,
            ADD=turned and not whole,
            **options(of_sums),
        )

    for begin in range(0, queries, panel):
        panel_tokens = begin, min(queries, begin + panel)
        tiles = cdiv(keys, of_scores.block), cdiv(panel_tokens[1] - begin, of_scores.rows)
        wide_attention_scores_kernel[tiles + (batch * heads,)](
            *(*strided(grad, q, k, v), lse, delta, weights, slopes, *strides),
            *(*ranges[:2], _rows_apart(ranges[0]), *ids, begin, queries, keys, heads, scale),
            **options(of_scores),
        )
        add_up(slopes, k, dq, scale, False)
        add_up(slopes, q, dk, scale, True)
        add_up(weights, grad, dv, 1.0, True)
    dk = dk if whole else dk.mul_(scale)
    dk, dv = (x.to(q.dtype).transpose(1, 2) for x in (dk, dv))
    return dq.transpose(1, 2), dk, dv
