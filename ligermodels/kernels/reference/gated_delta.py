"""Plain PyTorch: the gated delta rule, in chunks of a document.

A slot is a chunk of up to CHUNK tokens of one document, or empty. Document d has the slots from
cu_seqlens[d] // CHUNK + d up to those of the next one, which always suffice. An empty slot changes
no state. So the number of slots depends on shapes alone.

The formulas are those of arXiv:2412.06464. Of a slot: G is the sum of g up to each token, D_ij =
exp(G_i - G_j) for i >= j, A = tril(beta_i (k_i . k_j) D_ij, -1), T = (I + A)^-1, P = tril(q k^T D).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.checks import DeltaRule
from ligermodels.kernels.dispatch import cast, compute_dtype

CHUNK = 64


class _Slots(NamedTuple):
    """The tokens of each slot, and the slots of each document."""

    token: Tensor  # (slots, CHUNK): the number of tokens where there is none
    document: Tensor  # (slots,)
    first: Tensor  # (documents,)
    last: Tensor  # (documents,)

    def gather(self, x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """Return (slots, heads, CHUNK, ...) of x (tokens, heads or a divisor, ...)."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        rows = cast(padded, dtype)[self.token].transpose(1, 2)
        return rows.repeat_interleave(heads // x.shape[1], 1)

    def of_documents(self, states: Tensor | None, like: Tensor) -> Tensor:
        """Return each slot's state (slots, *like) of those of the documents, which may be zero."""
        if states is None:
            return like.new_zeros(1, *like.shape).expand(len(self.document), *like.shape)
        return cast(states, like.dtype)[self.document]

    def is_end(self, ends: Tensor) -> Tensor:
        """Return (slots, 1, 1, 1): whether a slot is its document's first or last, as given."""
        number = torch.arange(len(self.document), device=ends.device)
        return (ends[self.document] == number).view(-1, 1, 1, 1)

    def scatter(self, x: Tensor, like: Tensor) -> Tensor:
        """Return x (slots, heads, CHUNK, ...) of `gather` in the shape and dtype of `like`."""
        heads, group = like.shape[1], x.shape[1] // like.shape[1]
        rows = x.unflatten(1, (heads, group)).sum(2).transpose(1, 2)
        out = rows.new_empty(len(like) + 1, *like.shape[1:])
        out[self.token.flatten()] = rows.flatten(0, 1)
        return cast(out[:-1], like.dtype)


def _slots(cu_seqlens: Tensor, tokens: int) -> _Slots:
    documents = len(cu_seqlens) - 1
    number = torch.arange(tokens // CHUNK + documents, device=cu_seqlens.device)
    first = cu_seqlens[:-1] // CHUNK + number[:documents]
    document = torch.searchsorted(first, number, right=True) - 1
    last = torch.cat((first[1:], number[-1:] + 1)) - 1
    start = cu_seqlens[document] + (number - first[document]) * CHUNK
    token = start[:, None] + torch.arange(CHUNK, device=cu_seqlens.device)
    token = torch.where(token < cu_seqlens[document + 1][:, None], token, tokens)
    return _Slots(token, document, first, last)


class _Chunks(NamedTuple):
    """What the passes over the slots read: (slots, value heads, CHUNK, ...)."""

    q: Tensor  # times the scale
    k: Tensor
    v: Tensor
    beta: Tensor  # (..., 1), as are the next three
    total: Tensor  # exp(G)
    rest: Tensor  # exp(G_last - G)
    whole: Tensor  # (slots, value heads, 1, 1): exp(G_last)
    decay: Tensor  # D
    key_scores: Tensor  # k k^T D, below the diagonal
    scores: Tensor  # P
    inverse: Tensor  # T


def _chunks(slots: _Slots, rule: DeltaRule, scale: float) -> _Chunks:
    q, k, v, g, beta, *_ = rule
    heads, dtype = v.shape[1], compute_dtype(v)
    q_, k_, v_, beta_, g_ = (slots.gather(x, heads, dtype) for x in (q, k, v, beta, g))
    total = g_.cumsum(-1)[..., None]
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(below, total - total.mT, -torch.inf).exp()
    key_scores = (k_ @ k_.mT * decay).tril(-1)
    identity = torch.eye(CHUNK, dtype=dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(
        identity + beta_[..., None] * key_scores, identity, upper=False, unitriangular=True
    )
    q_ = q_ * scale
    end = total[..., -1:, :]
    return _Chunks(
        *(q_, k_, v_, beta_[..., None], total.exp(), (end - total).exp(), end.exp(), decay),
        key_scores,
        q_ @ k_.mT * decay,
        inverse,
    )


def _walk(
    slots: _Slots, chunks: _Chunks, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state before each slot, T beta (v - exp(G) k S) of it, and the state after it."""
    state = torch.zeros_like(chunks.k[0].mT @ chunks.v[0])
    starts = slots.of_documents(initial_state, state)
    is_first = slots.is_end(slots.first)
    states, changes, ends = [], [], []
    for i in range(len(slots.document)):
        state = torch.where(is_first[i], starts[i], state)
        states.append(state)
        change = chunks.beta[i] * (chunks.v[i] - chunks.total[i] * (chunks.k[i] @ state))
        changes.append(chunks.inverse[i] @ change)
        state = chunks.whole[i] * state + (chunks.rest[i] * chunks.k[i]).mT @ changes[-1]
        ends.append(state)
    return torch.stack(states), torch.stack(changes), torch.stack(ends)


def gated_delta_forward(rule: DeltaRule, scale: float) -> tuple[Tensor, Tensor]:
    """Return the outputs (tokens, value heads, dv) and the state after each document.

    Args: rule: q, k (tokens, key heads, dk); v (tokens, value heads, dv); g, beta (tokens, value
        heads); cu_seqlens (documents + 1,); initial_state (documents, value heads, dk, dv).
    """
    _, k, v, _, _, cu_seqlens, initial_state = rule
    if len(cu_seqlens) == 1:
        return torch.empty_like(v), cast(
            v.new_empty(0, v.shape[1], k.shape[2], v.shape[2]), compute_dtype(v)
        )
    slots = _slots(cu_seqlens, len(v))
    chunks = _chunks(slots, rule, scale)
    states, changes, ends = _walk(slots, chunks, initial_state)
    out = chunks.total * (chunks.q @ states) + chunks.scores @ changes
    return slots.scatter(out, v), ends[slots.last]


def gated_delta_backward(
    rule: DeltaRule, scale: float, grad_out: Tensor, grad_final: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g and beta, and of an initial state."""
    q, k, v, g, beta, cu_seqlens, initial_state = rule
    if len(cu_seqlens) == 1:
        return *(torch.empty_like(x) for x in (q, k, v, g, beta)), initial_state
    slots = _slots(cu_seqlens, len(v))
    chunks = _chunks(slots, rule, scale)
    states, changes, _ = _walk(slots, chunks, initial_state)
    q_, k_, v_, beta_, total, rest, whole, decay, key_scores, scores, inverse = chunks
    grad = slots.gather(grad_out, v.shape[1], v_.dtype)

    later = torch.zeros_like(states[0])
    finals, is_last = slots.of_documents(grad_final, later), slots.is_end(slots.last)
    grad_ends, grad_changes, grad_starts = [], [], []  # from the last slot to the first
    for i in reversed(range(len(slots.document))):
        later = torch.where(is_last[i], finals[i], later)
        grad_ends.append(later)
        grad_change = scores[i].mT @ grad[i] + rest[i] * (k_[i] @ later)
        grad_changes.append(inverse[i].mT @ grad_change)
        later = whole[i] * later + (total[i] * q_[i]).mT @ grad[i]
        later = later - (total[i] * beta_[i] * k_[i]).mT @ grad_changes[-1]
        grad_starts.append(later)
    after, u = torch.stack(grad_ends[::-1]), torch.stack(grad_changes[::-1])

    grad_scores = (grad @ changes.mT).tril() * decay
    grad_keys = -beta_ * (u @ changes.mT).tril(-1) * decay
    read = total * (grad @ states.mT)
    grad_q = (read + grad_scores @ k_) * scale
    grad_k = rest * (changes @ after.mT) - beta_ * total * (u @ states.mT)
    grad_k = grad_k + grad_scores.mT @ q_ + (grad_keys + grad_keys.mT) @ k_
    # E = T (v - exp(G) k S) without a product with beta
    error = v_ - total * (k_ @ states) - key_scores @ changes
    # exp(G) scales what queries and keys read, and 1 / exp(G) what keys write. A pair of tokens is
    # added to one and subtracted from the other, so what a token reads of its own is in no sum.
    pairs = grad_scores.tril(-1) * (q_ @ k_.mT) + grad_keys * (k_ @ k_.mT)
    written = (rest * changes * (k_ @ after)).sum(-1)
    grad_total = (read * q_).sum(-1) - (u * beta_ * total * (k_ @ states)).sum(-1)
    grad_total = grad_total + pairs.sum(-1) - pairs.sum(-2) - written
    # The state after a slot, from which the gradients of g are differences, in the same products.
    grad_total[..., -1] += (whole * states * after).sum((-1, -2)) + written.sum(-1)
    return (
        slots.scatter(grad_q, q),
        slots.scatter(grad_k, k),
        slots.scatter(beta_ * u, v),
        slots.scatter(grad_total.flip(-1).cumsum(-1).flip(-1), g),
        slots.scatter((u * error).sum(-1), beta),
        torch.stack(grad_starts[::-1])[slots.first],
    )
