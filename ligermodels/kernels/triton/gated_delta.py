"""The gated delta rule: matrices of each chunk, two walks over the documents, and the gradients.

The reference explains the slots. Here, keys = tril(k k^T D, -1), T = (I + keys beta)^-1 without its
diagonal, P is strictly lower too (its diagonal is with the gates), E = (I + T) (v - exp(G) k S),
and T' = (I + beta keys)^-1 without its diagonal. A token writes beta E into the state, u is the
gradient of this and beta u that of v. The walk of backward starts at the last chunk.

States and sums are in float32, and rounded where a product reads them. No product reads a
transposed result of another, because Triton before 3.7.1 may compile that wrong for Hopper: the
transposed product is computed instead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launch, Launches, cdiv, has_large_shared_memory, launch

# `block` is the columns of the values that a program handles at once.
# `rows` is the tokens of a chunk, by the bytes of an element.
CHUNKS = Launches(
    nvidia=((2, Launch(1, 4, rows=64)), (None, Launch(1, 8, rows=32))),
    amd=((None, Launch(1, 4, rows=32)),),
)
# For 16 bits on GPUs with much shared memory, and for all others. On an H100 with Triton 3.6, one
# stage of blocks of 32 columns in bfloat16 ended in an illegal memory access.
FORWARD = Launches(nvidia=((None, Launch(32, 4, 2)),), amd=((None, Launch(32, 4, 1)),))
FORWARD_SMALL = Launches(nvidia=((None, Launch(16, 4, 1)),), amd=((None, Launch(16, 4, 1)),))
BACKWARD = Launches(nvidia=((None, Launch(32, 4, 2)),), amd=((None, Launch(32, 4, 1)),))
BACKWARD_SMALL = Launches(nvidia=((None, Launch(16, 4, 1)),), amd=((None, Launch(16, 4, 1)),))
# By the bytes of an element.
GRADIENTS = Launches(
    nvidia=((2, Launch(64, 4, 1)), (None, Launch(16, 8, 1))), amd=((None, Launch(16, 4, 1)),)
)
MAX_KEY_DIM = 128


@triton.jit
def _find_slot(cu_seqlens_ptr, slot, documents, CHUNK: tl.constexpr):
    """Return the document of a slot, its first token, and the end of the document."""
    found = 0
    for start in range(0, documents, 128):
        document = start + tl.arange(0, 128)
        first = tl.load(cu_seqlens_ptr + document, mask=document < documents, other=0)
        begun = (first // CHUNK + document <= slot) & (document < documents)
        found += tl.sum(begun.to(tl.int32), 0)
    document = found - 1
    begin = tl.load(cu_seqlens_ptr + document)
    end = tl.load(cu_seqlens_ptr + document + 1)
    return document, begin + (slot - begin // CHUNK - document) * CHUNK, end


@triton.jit
def _load_rows(ptr, first, token, stride, column, inside, COLUMNS: tl.constexpr):
    at = (first + token).to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(ptr + at, mask=inside[:, None] & (column < COLUMNS)[None, :], other=0.0)


@triton.jit
def _load_state(ptr, column, value, KEYS: tl.constexpr, VALUES: tl.constexpr):
    mask = (column < KEYS)[:, None] & (value < VALUES)[None, :]
    return tl.load(ptr + column[:, None] * VALUES + value[None, :], mask=mask, other=0.0)


@triton.jit
def _load_gates(gates_ptr, index, CHUNK: tl.constexpr):
    """Return G and beta of a slot's tokens, G of the last one, and the diagonal of P."""
    at = gates_ptr + index * 3 * CHUNK
    token = tl.arange(0, CHUNK)
    total, beta = tl.load(at + token), tl.load(at + CHUNK + token)
    return total, beta, tl.load(at + CHUNK - 1), tl.load(at + 2 * CHUNK + token)


@triton.jit
def _load_square(ptr, index, CHUNK: tl.constexpr):
    token = tl.arange(0, CHUNK)
    return tl.load(ptr + index * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :])


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


@triton.jit
def gated_delta_chunk_kernel(
    q_ptr,
    q_token,
    q_head,
    k_ptr,
    k_token,
    k_head,
    g_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    gates_ptr,
    inverse_ptr,
    scores_ptr,
    turned_ptr,
    documents,
    heads,
    scale,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each program writes the gates, T and P of one slot and head; with turned_ptr, also T'."""
    index = tl.program_id(0).to(tl.int64)
    slot, head = (index // heads).to(tl.int32), index % heads
    _, first, end = _find_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if first < end:
        scale = tl.cast(scale, tl.float32)
        token = tl.arange(0, CHUNK)
        row, column = first + token, tl.arange(0, WIDTH)
        inside = row < end
        at = row.to(tl.int64) * heads + head
        total = tl.cumsum(tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32), 0)
        beta = tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(gates_ptr + index * 3 * CHUNK + token, total)
        tl.store(gates_ptr + index * 3 * CHUNK + CHUNK + token, beta)
        k_ptr += head // GROUP * k_head
        q_ptr += head // GROUP * q_head
        k = _load_rows(k_ptr, first, token, k_token, column, inside, KEYS)
        q = _load_rows(q_ptr, first, token, q_token, column, inside, KEYS)
        exponent = total[:, None] - total[None, :]
        before = token[:, None] > token[None, :]
        decay = tl.exp(tl.where(before, exponent, -float("inf")))
        square = index * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        own = tl.sum(tl.where(token[:, None] == token[None, :], scores, 0.0), 1)
        tl.store(gates_ptr + index * 3 * CHUNK + 2 * CHUNK + token, own)
        tl.store(scores_ptr + square, (scores * decay).to(scores_ptr.dtype.element_ty))
        keys = tl.dot(k, tl.trans(k), input_precision="ieee") * decay
        inverse = _inverse(keys * beta[None, :], CHUNK, PRECISION)
        below = tl.where(before, inverse, 0.0)
        tl.store(inverse_ptr + square, below.to(inverse_ptr.dtype.element_ty))
        if turned_ptr is not None:
            turned = tl.dot(inverse, keys, input_precision=PRECISION) * -beta[:, None]
            tl.store(turned_ptr + square, turned.to(turned_ptr.dtype.element_ty))


@triton.jit
def gated_delta_forward_kernel(
    q_ptr,
    q_token,
    q_head,
    k_ptr,
    k_token,
    k_head,
    v_ptr,
    v_token,
    v_head,
    gates_ptr,
    inverse_ptr,
    scores_ptr,
    cu_seqlens_ptr,
    initial_ptr,
    out_ptr,
    final_ptr,
    states_ptr,
    changes_ptr,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program walks over one document, for some columns of the values of one head.

    It writes the final state, and the outputs or, for backward, the states and E.
    """
    splits: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    pair = (program // splits).to(tl.int64)
    document, head = pair // HEADS, pair % HEADS
    token, column = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    value = program % splits * BLOCK + tl.arange(0, BLOCK)
    state_at = column[:, None] * VALUES + value[None, :]
    value_at = token[:, None] * (HEADS * VALUES) + value[None, :]
    state_mask = (column < KEYS)[:, None] & (value < VALUES)[None, :]
    begin, end = tl.load(cu_seqlens_ptr + document), tl.load(cu_seqlens_ptr + document + 1)
    scale = tl.cast(scale, tl.float32)
    k_ptr += head // GROUP * k_head
    q_ptr += head // GROUP * q_head
    v_ptr += head * v_head
    state = tl.zeros((WIDTH, BLOCK), tl.float32)
    if initial_ptr is not None:
        initial_ptr += pair * KEYS * VALUES
        state = tl.load(initial_ptr + state_at, mask=state_mask, other=0.0)
    index = (begin // CHUNK + document) * HEADS + head
    for i in range(tl.cdiv(end - begin, CHUNK)):
        first = begin + i * CHUNK
        inside = first + token < end
        k = _load_rows(k_ptr, first, token, k_token, column, inside, KEYS)
        v = _load_rows(v_ptr, first, token, v_token, value, inside, VALUES)
        inverse = _load_square(inverse_ptr, index, CHUNK)
        total, beta, last, own = _load_gates(gates_ptr, index, CHUNK)
        dtype: tl.constexpr = k.dtype
        rounded = state.to(dtype)
        grown = tl.exp(total)[:, None]
        old = tl.dot(k, rounded, input_precision="ieee")
        change = v.to(tl.float32) - grown * old
        change = tl.dot(inverse, change.to(dtype), change, input_precision="ieee")
        at = (first.to(tl.int64) * HEADS + head) * VALUES
        mask = inside[:, None] & (value < VALUES)[None, :]
        if states_ptr is not None:
            tl.store(states_ptr + index * KEYS * VALUES + state_at, rounded, mask=state_mask)
            tl.store(changes_ptr + at + value_at, change.to(dtype), mask=mask)
        change *= beta[:, None]
        if out_ptr is not None:
            q = _load_rows(q_ptr, first, token, q_token, column, inside, KEYS)
            scores = _load_square(scores_ptr, index, CHUNK)
            out = tl.dot(q, rounded, input_precision="ieee")
            out = out * (grown * scale) + own[:, None] * change
            out = tl.dot(scores, change.to(dtype), out, input_precision="ieee")
            tl.store(out_ptr + at + value_at, out.to(out_ptr.dtype.element_ty), mask=mask)
        change *= tl.exp(last - total)[:, None]
        state *= tl.exp(last)
        state = tl.dot(tl.trans(k), change.to(dtype), state, input_precision="ieee")
        index += HEADS
    tl.store(final_ptr + pair * KEYS * VALUES + state_at, state, mask=state_mask)


@triton.jit
def gated_delta_backward_kernel(
    q_ptr,
    q_token,
    q_head,
    k_ptr,
    k_token,
    k_head,
    grad_ptr,
    gates_ptr,
    inverse_ptr,
    scores_ptr,
    cu_seqlens_ptr,
    grad_final_ptr,
    grad_initial_ptr,
    after_ptr,
    u_ptr,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
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
    program = tl.program_id(0)
    pair = (program // splits).to(tl.int64)
    document, head = pair // HEADS, pair % HEADS
    token, column = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    value = program % splits * BLOCK + tl.arange(0, BLOCK)
    state_at = column[:, None] * VALUES + value[None, :]
    value_at = token[:, None] * (HEADS * VALUES) + value[None, :]
    state_mask = (column < KEYS)[:, None] & (value < VALUES)[None, :]
    begin, end = tl.load(cu_seqlens_ptr + document), tl.load(cu_seqlens_ptr + document + 1)
    scale = tl.cast(scale, tl.float32)
    k_ptr += head // GROUP * k_head
    q_ptr += head // GROUP * q_head
    later = tl.zeros((WIDTH, BLOCK), tl.float32)
    if grad_final_ptr is not None:
        grad_final_ptr += pair * KEYS * VALUES
        later = tl.load(grad_final_ptr + state_at, mask=state_mask, other=0.0)
    chunks = tl.cdiv(end - begin, CHUNK)
    index = (begin // CHUNK + document + chunks - 1) * HEADS + head
    for i in range(chunks):
        first = begin + (chunks - 1 - i) * CHUNK
        inside = first + token < end
        k = _load_rows(k_ptr, first, token, k_token, column, inside, KEYS)
        q = _load_rows(q_ptr, first, token, q_token, column, inside, KEYS)
        at = (first.to(tl.int64) * HEADS + head) * VALUES
        mask = inside[:, None] & (value < VALUES)[None, :]
        grad = tl.load(grad_ptr + at + value_at, mask=mask, other=0.0)
        inverse = _load_square(inverse_ptr, index, CHUNK)
        scores = _load_square(scores_ptr, index, CHUNK)
        total, beta, last, own = _load_gates(gates_ptr, index, CHUNK)
        dtype: tl.constexpr = k.dtype
        rounded = later.to(dtype)
        tl.store(after_ptr + index * KEYS * VALUES + state_at, rounded, mask=state_mask)
        grown = tl.exp(total)[:, None]
        change = tl.dot(k, rounded, input_precision="ieee") * tl.exp(last - total)[:, None]
        change = tl.dot(tl.trans(scores), grad, change, input_precision="ieee")
        change += own[:, None] * grad.to(tl.float32)
        u = tl.dot(tl.trans(inverse), change.to(dtype), change, input_precision="ieee")
        tl.store(u_ptr + at + value_at, u.to(dtype), mask=mask)
        later *= tl.exp(last)
        from_out = (grad.to(tl.float32) * (grown * scale)).to(dtype)
        later = tl.dot(tl.trans(q), from_out, later, input_precision="ieee")
        from_old = (u * (-grown * beta[:, None])).to(dtype)
        later = tl.dot(tl.trans(k), from_old, later, input_precision="ieee")
        index -= HEADS
    if grad_initial_ptr is not None:
        tl.store(grad_initial_ptr + pair * KEYS * VALUES + state_at, later, mask=state_mask)


@triton.jit
def gated_delta_gradients_kernel(
    q_ptr,
    q_token,
    q_head,
    k_ptr,
    k_token,
    k_head,
    v_ptr,
    v_token,
    v_head,
    grad_ptr,
    gates_ptr,
    cu_seqlens_ptr,
    states_ptr,
    changes_ptr,
    final_ptr,
    after_ptr,
    u_ptr,
    out_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_g_ptr,
    grad_beta_ptr,
    documents,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a slot of one key head: its value heads, and blocks of their values."""
    key_heads: tl.constexpr = HEADS // GROUP
    slot, key_head = tl.program_id(0) // key_heads, (tl.program_id(0) % key_heads).to(tl.int64)
    document, first, end = _find_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if first < end:
        scale = tl.cast(scale, tl.float32)
        token, column = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
        row = first + token
        inside = row < end
        q_ptr += key_head * q_head
        k_ptr += key_head * k_head
        q = _load_rows(q_ptr, first, token, q_token, column, inside, KEYS)
        k = _load_rows(k_ptr, first, token, k_token, column, inside, KEYS)
        dtype: tl.constexpr = k.dtype
        before = token[:, None] > token[None, :]
        upto = token[:, None] >= token[None, :]
        values: tl.constexpr = HEADS * VALUES  # of a token
        start_of_rows = first.to(tl.int64) * values

        # What has no products. It comes first, because the products need all registers.
        for member in range(GROUP):
            head = key_head * GROUP + member
            index = slot.to(tl.int64) * HEADS + head
            at = start_of_rows + head * VALUES
            state_at = index * KEYS * VALUES
            # The state after the slot is the next one, or the last of the document.
            next_at = states_ptr + state_at + HEADS * KEYS * VALUES
            final_at = final_ptr + (document.to(tl.int64) * HEADS + head) * KEYS * VALUES
            _, beta, _, _ = _load_gates(gates_ptr, index, CHUNK)
            grad_beta = tl.zeros((CHUNK,), tl.float32)
            grad_g = tl.zeros((CHUNK,), tl.float32)
            at_end = 0.0
            for start in range(0, VALUES, BLOCK):
                value = start + tl.arange(0, BLOCK)
                after = _load_state(after_ptr + state_at, column, value, KEYS, VALUES)
                if first + CHUNK < end:
                    state = _load_state(next_at, column, value, KEYS, VALUES).to(tl.float32)
                else:
                    state = _load_state(final_at, column, value, KEYS, VALUES)
                at_end += tl.sum(tl.sum(state * after.to(tl.float32), 1), 0)
                u = _load_rows(u_ptr + at, 0, token, values, value, inside, VALUES).to(tl.float32)
                change = _load_rows(changes_ptr + at, 0, token, values, value, inside, VALUES)
                grad_beta += tl.sum(u * change.to(tl.float32), 1)
                u *= beta[:, None]
                value_at = at + token[:, None] * values + value[None, :]
                mask = inside[:, None] & (value < VALUES)[None, :]
                tl.store(grad_v_ptr + value_at, u.to(grad_v_ptr.dtype.element_ty), mask=mask)
                v = _load_rows(v_ptr + head * v_head, first, token, v_token, value, inside, VALUES)
                grad_g -= tl.sum(u * v.to(tl.float32), 1)
                grad = _load_rows(grad_ptr + at, 0, token, values, value, inside, VALUES)
                out = _load_rows(out_ptr + at, 0, token, values, value, inside, VALUES)
                grad_g += tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
            grad_g = tl.cumsum(grad_g, 0, reverse=True) + at_end
            gate_at = (first.to(tl.int64) + token) * HEADS + head
            tl.store(grad_g_ptr + gate_at, grad_g.to(grad_g_ptr.dtype.element_ty), mask=inside)
            grad_beta = grad_beta.to(grad_beta_ptr.dtype.element_ty)
            tl.store(grad_beta_ptr + gate_at, grad_beta, mask=inside)

        key_at = ((first.to(tl.int64) + token)[:, None] * key_heads + key_head) * KEYS
        key_at += column[None, :]
        mask = inside[:, None] & (column < KEYS)[None, :]
        total_of_group = tl.zeros((CHUNK, WIDTH), tl.float32)
        for member in range(GROUP):
            head = key_head * GROUP + member
            index = slot.to(tl.int64) * HEADS + head
            at = start_of_rows + head * VALUES
            total, beta, _, _ = _load_gates(gates_ptr, index, CHUNK)
            decay = tl.exp(tl.where(upto, total[:, None] - total[None, :], -float("inf")))
            decay *= beta[None, :]
            for start in range(0, VALUES, BLOCK):
                value = start + tl.arange(0, BLOCK)
                grad = _load_rows(grad_ptr + at, 0, token, values, value, inside, VALUES)
                change = _load_rows(changes_ptr + at, 0, token, values, value, inside, VALUES)
                state_at = states_ptr + index * KEYS * VALUES
                state = _load_state(state_at, column, value, KEYS, VALUES)
                part = tl.dot(grad, tl.trans(state), input_precision="ieee")
                total_of_group += part * tl.exp(total)[:, None]
                pairs = tl.dot(grad, tl.trans(change), input_precision="ieee") * decay
                total_of_group = tl.dot(pairs.to(dtype), k, total_of_group, input_precision="ieee")
        grad_q = (total_of_group * scale).to(grad_q_ptr.dtype.element_ty)
        tl.store(grad_q_ptr + key_at, grad_q, mask=mask)

        total_of_group = tl.zeros((CHUNK, WIDTH), tl.float32)
        for member in range(GROUP):
            head = key_head * GROUP + member
            index = slot.to(tl.int64) * HEADS + head
            at = start_of_rows + head * VALUES
            total, beta, last, _ = _load_gates(gates_ptr, index, CHUNK)
            for start in range(0, VALUES, BLOCK):
                value = start + tl.arange(0, BLOCK)
                u = _load_rows(u_ptr + at, 0, token, values, value, inside, VALUES)
                state_at = states_ptr + index * KEYS * VALUES
                state = _load_state(state_at, column, value, KEYS, VALUES)
                part = tl.dot(u, tl.trans(state), input_precision="ieee")
                total_of_group -= part * (tl.exp(total) * beta)[:, None]
                change = _load_rows(changes_ptr + at, 0, token, values, value, inside, VALUES)
                state_at = after_ptr + index * KEYS * VALUES
                state = _load_state(state_at, column, value, KEYS, VALUES)
                part = tl.dot(change, tl.trans(state), input_precision="ieee")
                total_of_group += part * (tl.exp(last - total) * beta)[:, None]
                # Row i of these has the decay from token i to later ones.
                grad = _load_rows(grad_ptr + at, 0, token, values, value, inside, VALUES)
                ahead = tl.where(before, -float("inf"), total[None, :] - total[:, None])
                ahead = tl.exp(ahead) * beta[:, None]
                pairs = tl.dot(change, tl.trans(grad), input_precision="ieee") * (ahead * scale)
                total_of_group = tl.dot(pairs.to(dtype), q, total_of_group, input_precision="ieee")
                turned = tl.dot(change, tl.trans(u), input_precision="ieee") * ahead
                turned = tl.where(upto, 0.0, turned) * beta[None, :]
                pairs = tl.dot(u, tl.trans(change), input_precision="ieee") * beta[None, :]
                decay = tl.exp(tl.where(before, total[:, None] - total[None, :], -float("inf")))
                pairs = -pairs * decay * beta[:, None] - turned
                total_of_group = tl.dot(pairs.to(dtype), k, total_of_group, input_precision="ieee")
        grad_k = total_of_group.to(grad_k_ptr.dtype.element_ty)
        tl.store(grad_k_ptr + key_at, grad_k, mask=mask)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x (tokens, heads, columns) and its strides, with the columns of a head in order."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1)


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    if k.shape[2] > MAX_KEY_DIM:
        raise ValueError(
            f"gated_delta: keys have {k.shape[2]} columns; the Triton kernels take {MAX_KEY_DIM}"
        )
    width, chunk = (
        max(16, triton.next_power_of_2(k.shape[2])),
        launch(CHUNKS, k.element_size()).rows,
    )
    return {"GROUP": v.shape[1] // k.shape[1], "KEYS": k.shape[2], "WIDTH": width, "CHUNK": chunk}


def _setting(large: Launches, small: Launches, v: Tensor) -> tuple[Launch, int]:
    """Return the launch config, and the columns of the values that a program handles at once."""
    size = v.element_size()
    is_large = size == 2 and (bool(torch.version.hip) or has_large_shared_memory(v.device))
    setting = launch(large if is_large else small, size)
    return setting, min(setting.block, max(16, triton.next_power_of_2(v.shape[2])))


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    for_backward: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gates, T, P, and for backward T' of each slot: (slots, heads, ...)."""
    heads, documents = v.shape[1], len(cu_seqlens) - 1
    setting = launch(CHUNKS, q.element_size())
    slots = len(v) // setting.rows + documents
    gates = q.new_empty(slots, heads, 3, setting.rows, dtype=torch.float32)
    inverse, scores = (q.new_empty(slots, heads, setting.rows, setting.rows) for _ in range(2))
    turned = torch.empty_like(inverse) if for_backward else None
    gated_delta_chunk_kernel[(slots * heads,)](
        *_rows(q),
        *_rows(k),
        g.contiguous(),
        beta.contiguous(),
        cu_seqlens,
        gates,
        inverse,
        scores,
        turned,
        documents,
        heads,
        scale,
        **_sizes(k, v),
        # T is rounded to 16 bits; AMD and float32 have chunks of another length.
        PRECISION="tf32" if setting.rows == 64 else "ieee",
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return gates, inverse, scores, turned


def _walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: tuple[Tensor, Tensor, Tensor, Tensor | None],
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs and the final states; or E, these, and the state before each slot."""
    heads, documents = v.shape[1], len(cu_seqlens) - 1
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    size = heads, k.shape[2], v.shape[2]
    states = k.new_empty(len(chunks[0]), *size) if for_backward else None
    final = k.new_empty(documents, *size, dtype=torch.float32)
    setting, block = _setting(FORWARD, FORWARD_SMALL, v)
    gated_delta_forward_kernel[(documents * heads * cdiv(v.shape[2], block),)](
        *_rows(q),
        *_rows(k),
        *_rows(v),
        *chunks[:3],
        cu_seqlens,
        None if initial_state is None else initial_state.contiguous(),
        None if for_backward else out,
        final,
        states,
        out if for_backward else None,
        scale,
        **_sizes(k, v),
        HEADS=heads,
        VALUES=v.shape[2],
        BLOCK=block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return out, final, states


def gated_delta_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels for `reference.gated_delta_forward`."""
    if len(cu_seqlens) == 1:
        return torch.empty_like(v), v.new_empty(
            0, v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32
        )
    chunks = _chunks(q, k, v, g, beta, cu_seqlens, scale)
    return _walk(q, k, v, chunks, cu_seqlens, initial_state, scale, for_backward=False)[:2]


def gated_delta_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    scale: float,
    out: Tensor,
    grad_out: Tensor,
    grad_final: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Launch the kernels for `reference.gated_delta_backward`."""
    if len(cu_seqlens) == 1:
        return *(torch.empty_like(x) for x in (q, k, v, g, beta)), initial_state
    heads, documents = v.shape[1], len(cu_seqlens) - 1
    chunks = _chunks(q, k, v, g, beta, cu_seqlens, scale, for_backward=True)
    gates, _, scores, turned = chunks
    changes, final, states = _walk(q, k, v, chunks, cu_seqlens, initial_state, scale, True)
    assert states is not None
    out, grad_out = out.contiguous(), grad_out.contiguous()
    after, u = torch.empty_like(states), torch.empty_like(changes)
    grad_initial = None if initial_state is None else torch.empty_like(final)
    setting, block = _setting(BACKWARD, BACKWARD_SMALL, v)
    gated_delta_backward_kernel[(documents * heads * cdiv(v.shape[2], block),)](
        *_rows(q),
        *_rows(k),
        grad_out,
        gates,
        turned,
        scores,
        cu_seqlens,
        None if grad_final is None else grad_final.contiguous(),
        grad_initial,
        after,
        u,
        scale,
        **_sizes(k, v),
        HEADS=heads,
        VALUES=v.shape[2],
        BLOCK=block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta))
    setting, block = _setting(GRADIENTS, GRADIENTS, v)
    gated_delta_gradients_kernel[(len(states) * k.shape[1],)](
        *_rows(q),
        *_rows(k),
        *_rows(v),
        grad_out,
        gates,
        cu_seqlens,
        states,
        changes,
        final,
        after,
        u,
        out,
        *grads,
        documents,
        scale,
        **_sizes(k, v),
        HEADS=heads,
        VALUES=v.shape[2],
        BLOCK=block,
        num_warps=setting.num_warps,
        num_stages=setting.num_stages,
    )
    return *grads, grad_initial
