"""The choice of experts, its backward, and the order of the rows by expert."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.checks import Routing
from ligermodels.kernels.launch import Launch, Launches, cdiv, keywords, launch

# By the number of experts: `rows` tokens, or pairs of a token and an expert, for each program.
ROUTING = Launches(
    nvidia=((64, Launch(0, 4, rows=32)), (256, Launch(0, 4, rows=8)), (None, Launch(0, 4))),
    amd=((64, Launch(0, 4, rows=16)), (256, Launch(0, 4, rows=8)), (None, Launch(0, 4))),
)
SORT = Launches(
    nvidia=(
        (16, Launch(0, 4, rows=1024)),
        (128, Launch(0, 8, rows=128)),
        (256, Launch(0, 8, rows=64)),
        (None, Launch(0, 8, rows=16)),
    ),
    amd=(
        (16, Launch(0, 4, rows=1024)),
        (128, Launch(0, 4, rows=64)),
        (256, Launch(0, 4, rows=16)),
        (None, Launch(0, 4, rows=8)),
    ),
)


@triton.jit
def _scores(logits_ptr, row, rows, expert, experts, SCORE: tl.constexpr):
    """Return the scores of a tile of tokens in float32; rows outside repeat the last."""
    known = expert < experts
    at = tl.minimum(row, rows - 1) * experts + expert
    if SCORE == "sigmoid":
        scores = tl.sigmoid(tl.load(logits_ptr + at, mask=known, other=0.0).to(tl.float32))
    else:
        logits = tl.load(logits_ptr + at, mask=known, other=-float("inf")).to(tl.float32)
        highest = tl.max(logits, 1, keep_dims=True)
        scores = tl.exp(logits - tl.where(highest == -float("inf"), 0.0, highest))
        scores /= tl.sum(scores, 1, keep_dims=True)
    return tl.where(known, scores, 0.0)


@triton.jit
def routing_forward_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    rows,
    experts,
    scale,
    eps,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a tile of tokens and finds one expert of each at a time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK)[None, :]
    scores = _scores(logits_ptr, row, rows, expert, experts, SCORE)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)
    # A NaN would be chosen by no maximum, and every token must get experts that exist.
    choice = tl.where(expert < experts, tl.where(choice == choice, choice, 3.4e38), -float("inf"))
    slot = tl.arange(0, SLOTS)[None, :]
    weights = tl.zeros((ROWS, SLOTS), tl.float32)
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choice, 1, tie_break_left=True, keep_dims=True)
        mine = expert == best
        weights = tl.where(
            slot == k, tl.sum(tl.where(mine, scores, 0.0), 1, keep_dims=True), weights
        )
        chosen = tl.where(slot == k, best, chosen)
        choice = tl.where(mine, -float("inf"), choice)
    if NORMALIZE:
        weights /= tl.sum(weights, 1, keep_dims=True) + eps
    at = row * TOP_K + slot
    mask = (row < rows) & (slot < TOP_K)
    tl.store(weights_ptr + at, weights * scale, mask=mask)
    tl.store(experts_ptr + at, chosen, mask=mask)


@triton.jit
def routing_backward_kernel(
    logits_ptr,
    experts_ptr,
    grad_ptr,
    out_ptr,
    rows,
    experts,
    scale,
    eps,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles a tile of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, BLOCK)[None, :]
    scores = _scores(logits_ptr, row, rows, expert, experts, SCORE)
    grad = tl.zeros((ROWS, BLOCK), tl.float32)
    times = tl.zeros((ROWS, BLOCK), tl.float32)  # given routes may name an expert twice
    for k in tl.static_range(TOP_K):
        at = row * TOP_K + k
        here = expert == tl.load(experts_ptr + at, mask=row < rows, other=0)
        grad += tl.where(here, tl.load(grad_ptr + at, mask=row < rows, other=0.0) * scale, 0.0)
        times += here.to(tl.float32)
    if NORMALIZE:
        total = tl.sum(times * scores, 1, keep_dims=True) + eps
        mean = tl.sum(grad * scores, 1, keep_dims=True) / total
        grad = (grad - times * mean) / total
    if SCORE == "sigmoid":
        grad = grad * scores * (1 - scores)
    else:
        grad = scores * (grad - tl.sum(grad * scores, 1, keep_dims=True))
    at = row * experts + expert
    mask = (row < rows) & (expert < experts)
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _is_expert(named, pair, pairs, experts, BLOCK: tl.constexpr):
    """Return (pairs, BLOCK) int32: 1 where the pair, with the number `named`, is the expert's.

    A number that is no expert's becomes the nearest one, so that each pair has a row of its own.
    torch.compile takes a pointer that is passed to the function for one that the kernel writes to,
    because `place_kernel` computes addresses from the result.
    """
    named = tl.where(pair < pairs, tl.minimum(tl.maximum(named, 0), experts - 1), -1)
    return (named[:, None] == tl.arange(0, BLOCK)[None, :]).to(tl.int32)


@triton.jit
def count_kernel(experts_ptr, counts_ptr, pairs, experts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program counts how often each expert occurs in a run of pairs."""
    program = tl.program_id(0)
    pair = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    named = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    own = _is_expert(named, pair, pairs, experts, BLOCK)
    expert = tl.arange(0, BLOCK)
    at = expert.to(tl.int64) * tl.num_programs(0) + program
    tl.store(counts_ptr + at, tl.sum(own, 0), mask=expert < experts)


@triton.jit
def place_kernel(
    experts_ptr,
    ends_ptr,
    starts_ptr,
    order_ptr,
    place_ptr,
    pairs,
    experts,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program gives a run of pairs their rows.

    ends (experts, programs) counts the pairs of the experts before, and of the expert up to the
    run's end.
    """
    program = tl.program_id(0)
    pair = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    named = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    own = _is_expert(named, pair, pairs, experts, BLOCK)
    expert = tl.arange(0, BLOCK)
    at = expert.to(tl.int64) * tl.num_programs(0) + program
    end = tl.load(ends_ptr + at, mask=expert < experts, other=0)
    if program == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, end, mask=expert < experts)
        tl.store(starts_ptr, 0)
    before = (end - tl.sum(own, 0))[None, :] + tl.cumsum(own, 0) - 1
    row = tl.sum(tl.where(own > 0, before, 0), 1)
    tl.store(place_ptr + pair, row, mask=pair < pairs)
    tl.store(order_ptr + row, pair, mask=pair < pairs)


def routing_forward(
    logits: Tensor, bias: Tensor | None, top_k: int, options: Routing
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for `reference.routing_forward`."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k, dtype=torch.float32)
    chosen = logits.new_empty(rows, top_k, dtype=torch.int32)
    if rows:
        setting = launch(ROUTING, experts)
        routing_forward_kernel[(cdiv(rows, setting.rows),)](
            *(logits, bias if bias is None else bias.contiguous(), weights, chosen),
            *(rows, experts, options.scale, options.eps),
            SCORE=options.score,
            NORMALIZE=options.normalize,
            TOP_K=top_k,
            SLOTS=1 << (top_k - 1).bit_length(),
            ROWS=setting.rows,
            **keywords(setting),
        )
    return weights, chosen


def routing_backward(
    logits: Tensor, experts: Tensor, grad_weights: Tensor, options: Routing
) -> Tensor:
    """Launch the kernel for `reference.routing_backward`."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    rows, count = logits.shape
    if rows:
        setting = launch(ROUTING, count)
        routing_backward_kernel[(cdiv(rows, setting.rows),)](
            *(logits, experts, grad_weights.contiguous(), out),
            *(rows, count, options.scale, options.eps),
            SCORE=options.score,
            NORMALIZE=options.normalize,
            TOP_K=experts.shape[1],
            ROWS=setting.rows,
            **keywords(setting),
        )
    return out


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels for `reference.sort_by_expert`: a count, a scan and a placement."""
    experts = experts.contiguous()
    pairs = experts.numel()
    order, place = experts.new_empty(pairs), torch.empty_like(experts)
    setting = launch(SORT, count)
    programs = cdiv(pairs, setting.rows)
    if not pairs:
        return order, place, experts.new_zeros(count + 1)
    counts, starts = experts.new_empty(count * programs), experts.new_empty(count + 1)
    options = {"ROWS": setting.rows, **keywords(setting)}
    count_kernel[(programs,)](experts, counts, pairs, count, **options)
    ends = counts.cumsum(0, dtype=torch.int32)
    place_kernel[(programs,)](experts, ends, starts, order, place, pairs, count, **options)
    return order, place, starts
