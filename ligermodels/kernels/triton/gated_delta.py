"""The gated delta rule: matrices of each chunk, two walks over the documents, and the gradients.

The reference explains the slots. Here, keys = tril(k k^T D, -1), T = (I + keys beta)^-1 without its
diagonal, E = (I + T) (v - exp(G) k S), and T' = (I + beta keys)^-1 without its diagonal. A token
writes beta E into the state, u is the gradient of this and beta u that of v. The walk of backward
starts at the last chunk.

Sums, and the states between chunks, are in float32. What a token gets from those of its own chunk
decides how exact the results are, so less is rounded there:

- Forward rounds states, T, and what T and k^T multiply to the dtype of q. The products that make T
  and T', and that of P and beta E, have the precision of the launch config: TF32 for bfloat16. It
  has no more digits than float16, which so takes three products of TF32, or all digits.
- The walk of backward rounds states, T', and what T', k^T and q^T multiply to this dtype. P^T is
  split into two parts of it (`_dot`), and u is stored in float32.
- The gradients of q, k and g split E, and the product of the gradient of the output and E, too. All
  else that they multiply is rounded to this dtype: E and u, where they meet each other or a state,
  and the product of both.

No product reads a transposed result of another, because Triton before 3.7.1 may compile
that wrong for Hopper: the transposed product is computed instead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.checks import MAX_DELTA_KEY_DIM, DeltaRule
from ligermodels.kernels.launch import (
    Launch,
    Launches,
    cdiv,
    has_large_shared_memory,
    keywords,
    launch,
)

# `block` is the columns of the values that a program handles at once, `rows` the tokens of a chunk.
# The config of key 0 is for heads of 128 in 16 bits, that of key 2 for others in 16 bits. The
# assembler that Triton 3.6 and 3.7 use for Hopper (ptxas 12.8) compiles some kernels with many
# warp-group products (wgmma) to illegal reads of shared memory or to wrong results, which depends
# on everything that changes a register. So each config of four warps has been compared with float64
# on an H100 or an H200, numbers of heads are no constants, and key 2 has two warps, with which
# Triton uses no such products. Products of float32 use none either. In bfloat16 the walks over
# many documents have twice the columns of key 0, so that they read q, k, T and P half as often.
CHUNKS = Launches(
    nvidia=(
        (0, Launch(1, 4, rows=64, precision="tf32")),
        (2, Launch(1, 2, rows=32)),
        (None, Launch(1, 8, rows=32)),
    ),
    amd=Launch(1, 4, rows=32),
)
FORWARD = Launches(
    nvidia=((0, Launch(32, 4, 3)), (2, Launch(32, 2, 1)), (None, Launch(16, 8, 1))),
    amd=((2, Launch(32, 4, 1)), (None, Launch(16, 4, 1))),
)
BACKWARD = Launches(
    nvidia=((0, Launch(32, 4, 3)), (2, Launch(16, 2, 1)), (None, Launch(16, 4, 1))),
    amd=((2, Launch(32, 2, 1)), (None, Launch(16, 4, 1))),
)
GRADIENTS = Launches(
    nvidia=((0, Launch(16, 4, 2)), (2, Launch(16, 2, 1)), (None, Launch(16, 8, 1))),
    amd=Launch(16, 4, 1, reload=True),
)
TUNED_DIM = 128
MANY = 2**13  # columns of all documents and heads, of which 64 for each program occupy an H100
INTEGERS = ["documents", "heads", "group"]  # one compiled kernel serves all


@triton.jit
def _find_slot(cu_seqlens_ptr, slot, documents, CHUNK: tl.constexpr):
    """Return the first token of a slot, and the end of its document."""
    found = 0
    for start in range(0, documents, 128):
        document = start + tl.arange(0, 128)
        first = tl.load(cu_seqlens_ptr + document, mask=document < documents, other=0)
        begun = (first // CHUNK + document <= slot) & (document < documents)
        found += tl.sum(begun.to(tl.int32), 0)
    document = found - 1
    begin = tl.load(cu_seqlens_ptr + document)
    end = tl.load(cu_seqlens_ptr + document + 1)
    return begin + (slot - begin // CHUNK - document) * CHUNK, end


@triton.jit
def _load_rows(ptr, first, head, end, column, heads, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Load the columns of a head (tokens, heads, COLUMNS) of a slot's tokens, or zeros."""
    token = first + tl.arange(0, CHUNK)
    at = (token.to(tl.int64) * heads + head)[:, None] * COLUMNS + column[None, :]
    mask = (token < end)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    ptr, x, first, head, end, column, heads, COLUMNS: tl.constexpr, CHUNK: tl.constexpr
):
    token = first + tl.arange(0, CHUNK)
    at = (token.to(tl.int64) * heads + head)[:, None] * COLUMNS + column[None, :]
    mask = (token < end)[:, None] & (column < COLUMNS)[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _state_at(index, column, value, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Return where the state of an index is, and which of its elements there are."""
    at = index * (KEYS * VALUES) + column[:, None] * VALUES + value[None, :]
    return at, (column < KEYS)[:, None] & (value < VALUES)[None, :]


@triton.jit
def _load_gates(gates_ptr, index, CHUNK: tl.constexpr):
    """Return G and beta of a slot's tokens, and G of the last one."""
    at = gates_ptr + index * 2 * CHUNK + tl.arange(0, CHUNK)
    return tl.load(at), tl.load(at + CHUNK), tl.load(gates_ptr + index * 2 * CHUNK + CHUNK - 1)


@triton.jit
def _load_square(ptr, index, CHUNK: tl.constexpr):
    token = tl.arange(0, CHUNK)
    return tl.load(ptr + index * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :])


@triton.jit
def _dot(a, b, c):
    """Return c + a b. If only one of them is in float32, it is in two parts of the other dtype."""
    if a.dtype == b.dtype:
        c = tl.dot(a, b, c, input_precision="ieee")
    elif a.dtype == tl.float32:
        high = a.to(b.dtype)
        c = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, c, input_precision="ieee")
        c = tl.dot(high, b, c, input_precision="ieee")
    else:
        high = b.to(a.dtype)
        c = tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), c, input_precision="ieee")
        c = tl.dot(a, high, c, input_precision="ieee")
    return c


@triton.jit
def _rounded(x, PRECISION: tl.constexpr):
    """Round float32 to the nearest TF32, because the products of Hopper cut its digits off."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower triangular matrix.

    The blocks of 16 on the diagonal are inverted by substitution. Then pairs of blocks are joined:
    the inverse of (B, 0; N, C) is (B^-1, 0; -C^-1 N B^-1, C^-1).
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    block = tl.arange(0, BLOCKS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(a, (BLOCKS, 16, BLOCKS, 16)), 0.0), 2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    t = tl.zeros((BLOCKS, 16, 16), tl.float32) + (row == column).to(tl.float32)
    for i in tl.static_range(15):
        factor = tl.sum(tl.where(column == i, blocks, 0.0), 2)
        done = tl.sum(tl.where(row == i, t, 0.0), 1)
        t -= factor[:, :, None] * done[:, None, :]
    t = tl.where(on_diagonal, t[:, :, None, :], 0.0)
    t = tl.reshape(t, (CHUNK, CHUNK))
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    size: tl.constexpr = 16
    for level in tl.static_range(CHUNK // 32):
        step = size * 2**level
        joined = (row // (2 * step) == column // (2 * step)) & (row // step != column // step)
        between = tl.dot(tl.where(joined, a, 0.0), t, input_precision=PRECISION)
        t -= tl.dot(t, between, input_precision=PRECISION)
    return t


@triton.jit(do_not_specialize=INTEGERS)
def gated_delta_chunk_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    gates_ptr,
    inverse_ptr,
    scores_ptr,
    turned_ptr,
    documents,
    scale,
    heads,
    group,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program writes the gates, T and P of one slot and head; with turned_ptr T' and P^T."""
    index = tl.program_id(0).to(tl.int64)
    slot, head = (index // heads).to(tl.int32), index % heads
    first, end = _find_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if first < end:
        token, column = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
        at = (first + token).to(tl.int64) * heads + head
        g = tl.load(g_ptr + at, mask=first + token < end, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + at, mask=first + token < end, other=0.0).to(tl.float32)
        total = tl.cumsum(g, 0)
        tl.store(gates_ptr + index * 2 * CHUNK + token, total)
        tl.store(gates_ptr + index * 2 * CHUNK + CHUNK + token, beta)
        key_head = head // group
        k = _load_rows(k_ptr, first, key_head, end, column, heads // group, KEYS, CHUNK)
        q = _load_rows(q_ptr, first, key_head, end, column, heads // group, KEYS, CHUNK)
        row, other = token[:, None], token[None, :]
        exponent = total[:, None] - total[None, :]
        decay = tl.exp(tl.where(row >= other, exponent, -float("inf")))
        square = index * CHUNK * CHUNK + row * CHUNK + other
        keys = tl.where(row > other, tl.dot(k, tl.trans(k), input_precision="ieee") * decay, 0.0)
        inverse = _inverse(keys * beta[None, :], CHUNK, PRECISION)
        below = tl.where(row > other, inverse, 0.0)
        tl.store(inverse_ptr + square, below.to(inverse_ptr.dtype.element_ty))
        if turned_ptr is not None:
            turned = tl.dot(inverse, keys, input_precision=PRECISION) * -beta[:, None]
            tl.store(turned_ptr + square, turned.to(turned_ptr.dtype.element_ty))
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            decay = tl.exp(tl.where(row <= other, -exponent, -float("inf")))
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores *= decay * tl.cast(scale, tl.float32)
        if turned_ptr is None:
            scores = _rounded(scores, PRECISION)
        tl.store(scores_ptr + square, scores)


@triton.jit(do_not_specialize=INTEGERS)
def gated_delta_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    gates_ptr,
    inverse_ptr,
    scores_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    states_ptr,
    scale,
    heads,
    group,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program walks over one document, for some columns of the values of one head.

    It writes the final state, and out; for backward the states, and E in the place of out.
    """
    splits: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    key_heads = heads // group
    pair = (tl.program_id(0) // splits).to(tl.int64)
    document, head = pair // heads, pair % heads
    column = tl.arange(0, WIDTH)
    value = tl.program_id(0) % splits * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(cu_seqlens_ptr + document), tl.load(cu_seqlens_ptr + document + 1)
    scale = tl.cast(scale, tl.float32)
    pair_at, inside = _state_at(pair, column, value, KEYS, VALUES)
    state = tl.zeros((WIDTH, BLOCK), tl.float32)
    if initial_ptr is not None:
        state = tl.load(initial_ptr + pair_at, mask=inside, other=0.0)
    index = (begin // CHUNK + document) * heads + head
    for first in range(begin, end, CHUNK):
        k = _load_rows(k_ptr, first, head // group, end, column, key_heads, KEYS, CHUNK)
        v = _load_rows(v_ptr, first, head, end, value, heads, VALUES, CHUNK)
        inverse = _load_square(inverse_ptr, index, CHUNK)
        total, beta, last = _load_gates(gates_ptr, index, CHUNK)
        rounded = state.to(k.dtype)
        grown = tl.exp(total)[:, None]
        change = v.to(tl.float32) - grown * tl.dot(k, rounded, input_precision="ieee")
        change = tl.dot(inverse, change.to(k.dtype), change, input_precision="ieee")
        if states_ptr is not None:
            at, _ = _state_at(index, column, value, KEYS, VALUES)
            tl.store(states_ptr + at, rounded, mask=inside)
            _store_rows(out_ptr, change, first, head, end, value, heads, VALUES, CHUNK)
        change *= beta[:, None]
        if states_ptr is None:
            q = _load_rows(q_ptr, first, head // group, end, column, key_heads, KEYS, CHUNK)
            scores = _load_square(scores_ptr, index, CHUNK)
            out = tl.dot(q, rounded, input_precision="ieee") * (grown * scale)
            out = tl.dot(scores, _rounded(change, PRECISION), out, input_precision=PRECISION)
            _store_rows(out_ptr, out, first, head, end, value, heads, VALUES, CHUNK)
        change *= tl.exp(last - total)[:, None]
        state *= tl.exp(last)
        state = tl.dot(tl.trans(k), change.to(k.dtype), state, input_precision="ieee")
        index += heads
    tl.store(final_ptr + pair_at, state, mask=inside)


@triton.jit(do_not_specialize=INTEGERS)
def gated_delta_backward_kernel(
    q_ptr,
    k_ptr,
    grad_ptr,
    gates_ptr,
    turned_ptr,
    scores_ptr,
    cu_seqlens_ptr,
    grad_final_ptr,
    grad_initial_ptr,
    after_ptr,
    u_ptr,
    scale,
    heads,
    group,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program walks back over one document, for some columns of the values of one head.

    It writes the gradient of the state after each slot, and that of beta (v - exp(G) k S).
    """
    splits: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    key_heads = heads // group
    pair = (tl.program_id(0) // splits).to(tl.int64)
    document, head = pair // heads, pair % heads
    column = tl.arange(0, WIDTH)
    value = tl.program_id(0) % splits * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(cu_seqlens_ptr + document), tl.load(cu_seqlens_ptr + document + 1)
    scale = tl.cast(scale, tl.float32)
    pair_at, inside = _state_at(pair, column, value, KEYS, VALUES)
    later = tl.zeros((WIDTH, BLOCK), tl.float32)
    if grad_final_ptr is not None:
        later = tl.load(grad_final_ptr + pair_at, mask=inside, other=0.0)
    chunks = tl.cdiv(end - begin, CHUNK)
    index = (begin // CHUNK + document + chunks - 1) * heads + head
    for i in range(chunks):
        first = begin + (chunks - 1 - i) * CHUNK
        k = _load_rows(k_ptr, first, head // group, end, column, key_heads, KEYS, CHUNK)
        q = _load_rows(q_ptr, first, head // group, end, column, key_heads, KEYS, CHUNK)
        grad = _load_rows(grad_ptr, first, head, end, value, heads, VALUES, CHUNK)
        turned = _load_square(turned_ptr, index, CHUNK)
        scores = _load_square(scores_ptr, index, CHUNK)
        total, beta, last = _load_gates(gates_ptr, index, CHUNK)
        rounded = later.to(k.dtype)
        at, _ = _state_at(index, column, value, KEYS, VALUES)
        tl.store(after_ptr + at, rounded, mask=inside)
        grown = tl.exp(total)[:, None]
        change = tl.dot(k, rounded, input_precision="ieee") * tl.exp(last - total)[:, None]
        change = _dot(scores, grad, change)
        u = tl.dot(tl.trans(turned), change.to(k.dtype), change, input_precision="ieee")
        _store_rows(u_ptr, u, first, head, end, value, heads, VALUES, CHUNK)
        later *= tl.exp(last)
        from_out = (grad.to(tl.float32) * (grown * scale)).to(k.dtype)
        later = tl.dot(tl.trans(q), from_out, later, input_precision="ieee")
        from_old = (u * (-grown * beta[:, None])).to(k.dtype)
        later = tl.dot(tl.trans(k), from_old, later, input_precision="ieee")
        index -= heads
    if grad_initial_ptr is not None:
        tl.store(grad_initial_ptr + pair_at, later, mask=inside)


@triton.jit(do_not_specialize=INTEGERS)
def gated_delta_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    gates_ptr,
    cu_seqlens_ptr,
    states_ptr,
    changes_ptr,
    after_ptr,
    u_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_g_ptr,
    grad_beta_ptr,
    totals_ptr,
    documents,
    scale,
    heads,
    group,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """Each program handles a slot of one key head: its value heads, and blocks of their values.

    The first launch, OF_KEYS, writes the gradients of k, v and beta, and its part of that of g. The
    second one adds the part of the queries, and writes the gradients of q and g. With RELOAD, what
    is the same for all value heads is computed for each, because AMD has too few scalar registers.
    """
    key_heads = heads // group
    slot, key_head = tl.program_id(0) // key_heads, (tl.program_id(0) % key_heads).to(tl.int64)
    first, end = _find_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    scale = tl.cast(scale, tl.float32)  # torch.compile passes Python floats as float64
    if first < end:
        token, column = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
        row, other = token[:, None], token[None, :]
        q = _load_rows(q_ptr, first, key_head, end, column, key_heads, KEYS, CHUNK)
        k = _load_rows(k_ptr, first, key_head, end, column, key_heads, KEYS, CHUNK)
        dtype: tl.constexpr = k.dtype
        EXACT: tl.constexpr = k.dtype == tl.float32
        sums = tl.zeros((CHUNK, WIDTH), tl.float32)
        none = tl.zeros((CHUNK, CHUNK), tl.float32)
        for member in tl.range(0, group, disable_licm=RELOAD):
            head = key_head * group + member
            index = slot.to(tl.int64) * heads + head
            total, beta, last = _load_gates(gates_ptr, index, CHUNK)
            pairs = none
            of_tokens, there = (first.to(tl.int64) + token) * heads + head, first + token < end
            if OF_KEYS:
                forgotten = (tl.exp(total) * -beta)[:, None]
                kept = (tl.exp(last - total) * beta)[:, None]
                turned, from_out = none, none
                of_total = tl.zeros((CHUNK,), tl.float32)
                of_beta, written = of_total, of_total
                at_end = tl.zeros((WIDTH,), tl.float32)
                for start in range(0, VALUES, BLOCK):
                    value = start + tl.arange(0, BLOCK)
                    u = _load_rows(u_ptr, first, head, end, value, heads, VALUES, CHUNK)
                    change = _load_rows(changes_ptr, first, head, end, value, heads, VALUES, CHUNK)
                    grad = _load_rows(grad_ptr, first, head, end, value, heads, VALUES, CHUNK)
                    v = _load_rows(v_ptr, first, head, end, value, heads, VALUES, CHUNK)
                    at, inside = _state_at(index, column, value, KEYS, VALUES)
                    state = tl.load(states_ptr + at, mask=inside, other=0.0)
                    after = tl.load(after_ptr + at, mask=inside, other=0.0)
                    # The state after the slot is what is left of it and what the tokens write. Both
                    # are multiplied here, because the next state has been rounded: the gradients of
                    # g are differences of such sums.
                    at_end += tl.sum(state.to(tl.float32) * after.to(tl.float32), 1)
                    written += tl.sum(change * tl.dot(k, after, input_precision="ieee"), 1)
                    # exp(G) scales what queries and keys read, and 1 / exp(G) what keys write. The
                    # sum of both is u v and what a query reads of its own token, which cancel out.
                    # Where g forgets nearly all, that rounds away the rest: float32 adds each pair
                    # of tokens to one and subtracts it from the other, and needs no u v.
                    read = v.to(tl.float32)
                    if EXACT:
                        read = tl.dot(k, state, input_precision="ieee") * tl.exp(total)[:, None]
                    of_total += tl.sum(u * read, 1)
                    of_beta += tl.sum(u * change, 1)
                    part = u * beta[:, None]
                    _store_rows(grad_v_ptr, part, first, head, end, value, heads, VALUES, CHUNK)
                    part = (u * forgotten).to(dtype)
                    sums = tl.dot(part, tl.trans(state), sums, input_precision="ieee")
                    part = (change * kept).to(dtype)
                    sums = tl.dot(part, tl.trans(after), sums, input_precision="ieee")
                    from_out = _dot(change, tl.trans(grad), from_out)
                    rounded, u = change.to(dtype), u.to(dtype)
                    pairs = tl.dot(u, tl.trans(rounded), pairs, input_precision="ieee")
                    turned = tl.dot(rounded, tl.trans(u), turned, input_precision="ieee")
                # The decays are made here, because the products above need all registers.
                exponent = total[:, None] - total[None, :]
                decay = tl.exp(tl.where(row > other, exponent, -float("inf")))
                # Row i of `ahead` has the decay from token i to later ones.
                ahead = tl.exp(tl.where(row <= other, -exponent, -float("inf")))
                pairs = tl.where(row > other, pairs * decay, 0.0)
                pairs += tl.where(row < other, turned * ahead, 0.0)
                pairs *= -beta[:, None] * beta[None, :]
                sums = tl.dot(pairs.to(dtype), k, sums, input_precision="ieee")
                sums = _dot(from_out * ahead * (beta * scale)[:, None], q, sums)
                of_beta = of_beta.to(grad_beta_ptr.dtype.element_ty)
                tl.store(grad_beta_ptr + of_tokens, of_beta, mask=there)
                # A second tl.sum of what a product made does not compile for sm_100 (triton 3.7).
                written = written * tl.exp(last - total) * beta
                ended = tl.cumsum(written, 0)
                if EXACT:
                    ended -= written
                ended += tl.sum(at_end, 0) * tl.exp(last)
                grad_total = tl.where(token == CHUNK - 1, ended, -written if EXACT else 0.0)
                grad_total -= of_total * beta
                if EXACT:
                    pairs = tl.where(row > other, pairs, -pairs)
                    grad_total += tl.sum(pairs * tl.dot(k, tl.trans(k), input_precision="ieee"), 1)
                tl.store(totals_ptr + index * CHUNK + token, grad_total)
            else:
                read = tl.zeros((CHUNK, WIDTH), tl.float32)
                for start in range(0, VALUES, BLOCK):
                    value = start + tl.arange(0, BLOCK)
                    grad = _load_rows(grad_ptr, first, head, end, value, heads, VALUES, CHUNK)
                    change = _load_rows(changes_ptr, first, head, end, value, heads, VALUES, CHUNK)
                    at, inside = _state_at(index, column, value, KEYS, VALUES)
                    state = tl.load(states_ptr + at, mask=inside, other=0.0)
                    read = tl.dot(grad, tl.trans(state), read, input_precision="ieee")
                    pairs = _dot(grad, tl.trans(change), pairs)
                read *= (tl.exp(total) * scale)[:, None]
                sums += read
                q = _load_rows(q_ptr, first, key_head, end, column, key_heads, KEYS, CHUNK)
                grad_total = tl.load(totals_ptr + index * CHUNK + token)
                grad_total += tl.sum(read * q.to(tl.float32), 1)
                exponent = total[:, None] - total[None, :]
                decay = tl.exp(tl.where(row >= other, exponent, -float("inf")))
                pairs *= decay * (beta * scale)[None, :]
                of_pairs = pairs * tl.dot(q, tl.trans(k), input_precision="ieee")
                if EXACT:
                    of_pairs = tl.where(row > other, of_pairs, 0.0)
                    grad_total -= tl.sum(of_pairs, 0)
                grad_total += tl.sum(of_pairs, 1)
                grad_g = tl.cumsum(grad_total, 0, reverse=True).to(grad_g_ptr.dtype.element_ty)
                tl.store(grad_g_ptr + of_tokens, grad_g, mask=there)
                sums = _dot(pairs, k, sums)
        if OF_KEYS:
            _store_rows(grad_k_ptr, sums, first, key_head, end, column, key_heads, KEYS, CHUNK)
        else:
            _store_rows(grad_q_ptr, sums, first, key_head, end, column, key_heads, KEYS, CHUNK)


def _key(rule: DeltaRule) -> int:
    """Return the key of the launch configs: 0 for the sizes that they were compared at."""
    v = rule.v
    tuned = rule.k.shape[2] == v.shape[2] == TUNED_DIM and has_large_shared_memory(v.device)
    return 0 if tuned and v.element_size() == 2 else v.element_size()


def _precision(rule: DeltaRule) -> str:
    precision = launch(CHUNKS, _key(rule)).precision
    return "tf32x3" if precision == "tf32" and rule.q.dtype == torch.float16 else precision


def _sizes(rule: DeltaRule) -> dict[str, int]:
    heads, (key_heads, keys) = rule.v.shape[1], rule.k.shape[1:]
    if keys > MAX_DELTA_KEY_DIM:
        raise ValueError(
            f"gated_delta: keys have {keys} columns; the Triton kernels take {MAX_DELTA_KEY_DIM}"
        )
    width = max(16, triton.next_power_of_2(keys))
    sizes = {"heads": heads, "group": heads // key_heads, "KEYS": keys, "WIDTH": width}
    return {**sizes, "CHUNK": launch(CHUNKS, _key(rule)).rows}


def _options(launches: Launches, rule: DeltaRule) -> dict[str, int]:
    """Return the launch config, with the columns of the values that a program handles at once."""
    setting, (heads, values) = launch(launches, _key(rule)), rule.v.shape[1:]
    many = (len(rule.cu_seqlens) - 1) * heads * values >= MANY and rule.v.dtype == torch.bfloat16
    if many and launches is not GRADIENTS and _key(rule) == 0:
        setting = setting._replace(block=2 * setting.block)
    block = min(setting.block, max(16, triton.next_power_of_2(values)))
    return {**_sizes(rule), **keywords(setting), "VALUES": values, "BLOCK": block}


def _chunks(rule: DeltaRule, scale: float, for_backward: bool) -> tuple[Tensor | None, ...]:
    """Return the gates, T and P of each slot, and None; for backward P^T and T' in their place.

    Each is (slots, heads, ...).
    """
    q, k, v, g, beta, cu_seqlens, _ = rule
    sizes, setting = _sizes(rule), launch(CHUNKS, _key(rule))
    heads, chunk, documents = v.shape[1], sizes["CHUNK"], len(cu_seqlens) - 1
    slots = len(q) // chunk + documents
    gates = q.new_empty(slots, heads, 2, chunk, dtype=torch.float32)
    inverse = q.new_empty(slots, heads, chunk, chunk)
    scores = torch.empty_like(inverse, dtype=torch.float32)
    turned = torch.empty_like(inverse) if for_backward else None
    gated_delta_chunk_kernel[(slots * heads,)](
        *(q, k, g, beta, cu_seqlens, gates, inverse, scores, turned, documents, scale),
        **sizes,
        PRECISION=_precision(rule),
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return gates, inverse, scores, turned


def _walk(
    rule: DeltaRule, chunks: tuple[Tensor | None, ...], scale: float, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs and the final states; or E, these, and the state before each slot."""
    q, k, v, *_, cu_seqlens, initial_state = rule
    documents, heads, dv = len(cu_seqlens) - 1, *v.shape[1:]
    out = torch.empty_like(v, dtype=torch.float32 if for_backward else v.dtype)
    final = k.new_empty(documents, heads, k.shape[2], dv, dtype=torch.float32)
    slots = len(q) // _sizes(rule)["CHUNK"] + documents
    states = k.new_empty(slots, *final.shape[1:]) if for_backward else None
    options = _options(FORWARD, rule)
    gated_delta_forward_kernel[(documents * heads * cdiv(dv, options["BLOCK"]),)](
        *(q, k, v, *chunks[:3], cu_seqlens, initial_state, out, final, states, scale),
        PRECISION=_precision(rule),
        **options,
    )
    return out, final, states


def _contiguous(rule: DeltaRule) -> DeltaRule:
    return DeltaRule(*(None if x is None else x.contiguous() for x in rule))  # type: ignore[arg-type]


def gated_delta_forward(rule: DeltaRule, scale: float) -> tuple[Tensor, Tensor]:
    """Launch the kernels for `reference.gated_delta_forward`."""
    if len(rule.cu_seqlens) == 1:
        shape = 0, rule.v.shape[1], rule.k.shape[2], rule.v.shape[2]
        return torch.empty_like(rule.v), rule.v.new_empty(shape, dtype=torch.float32)
    rule = _contiguous(rule)
    return _walk(rule, _chunks(rule, scale, False), scale, False)[:2]


def gated_delta_backward(
    rule: DeltaRule, scale: float, grad_out: Tensor, grad_final: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Launch the kernels for `reference.gated_delta_backward`."""
    if len(rule.cu_seqlens) == 1:
        return *(torch.empty_like(x) for x in rule[:5]), rule.initial_state
    rule, grad_out = _contiguous(rule), grad_out.contiguous()
    grad_final = None if grad_final is None else grad_final.contiguous()
    q, k, v, _, _, cu_seqlens, initial_state = rule
    documents = len(cu_seqlens) - 1
    chunks = gates, _, scores, turned = _chunks(rule, scale, True)
    changes, _, states = _walk(rule, chunks, scale, True)
    assert states is not None
    after, u = torch.empty_like(states), torch.empty_like(changes)
    grad_initial = None if initial_state is None else torch.empty_like(initial_state)
    options = _options(BACKWARD, rule)
    gated_delta_backward_kernel[(documents * v.shape[1] * cdiv(v.shape[2], options["BLOCK"]),)](
        *(q, k, grad_out, gates, turned, scores, cu_seqlens, grad_final, grad_initial, after, u),
        scale,
        **options,
    )
    grads = tuple(torch.empty_like(x) for x in rule[:5])
    totals = u.new_empty(len(states), v.shape[1], options["CHUNK"])
    for of_keys in (True, False):
        gated_delta_gradients_kernel[(len(states) * k.shape[1],)](
            *(q, k, v, grad_out, gates, cu_seqlens, states, changes, after, u, *grads),
            *(totals, documents, scale),
            OF_KEYS=of_keys,
            RELOAD=launch(GRADIENTS, _key(rule)).reload,
            **_options(GRADIENTS, rule),
        )
    return *grads, grad_initial
