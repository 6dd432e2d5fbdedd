"""The chunk plan of a loss head: how many logits exist at once, from sizes and a byte budget."""

from typing import NamedTuple

from torch import Tensor

from ligermodels.kernels.dispatch import choose

DEFAULT_LOGITS_BYTES = 2**30
"""Default scratch for logits; the float32 accumulator of the weight gradient comes on top."""

MIN_ACCUMULATED_ROWS = 768
"""Fewest rows a chunk must have for accumulating the weight gradient to beat recomputing logits.

Adding a chunk of c rows reads and writes the accumulator, 8 * vocab * in bytes; making its logits
again costs 2 * c * vocab * in operations. At 4.3 TB/s and 700 TFLOP/s they are equal at c = 650.
"""

TOKEN_BYTES = 64
"""Scratch for each token: loss, z-loss, logsumexp, masks, float32 or int64, joined from chunks."""


def wide_copies(hidden: Tensor, with_stats: bool) -> int:
    """Copies of a chunk's logits in `compute_dtype` that exist at the peak besides the logits."""
    if choose(hidden.device, hidden.dtype)[0] == "triton":
        return 0  # the kernels work in place
    return 7 + 2 * with_stats  # with every option set


class Sizes(NamedTuple):
    """What a loss head needs memory for."""

    rows: int  # tokens that logits are made for
    vocab: int
    logit_bytes: int  # for each logit of a chunk
    hidden_bytes: int = 0  # for each row of a chunk whose hidden states are gathered
    accumulator_bytes: int = 0  # to sum the weight gradient over chunks; 0 where none is needed
    single_chunk_bytes: int = 0  # besides the logits of a single chunk, in either pass
    saved_weight_bytes: int = 0  # weight gradient that a single chunk saves for backward
    saved_hidden_bytes: int = 0  # hidden gradient that forward saves for backward
    fixed_bytes: int = 0  # whatever the chunk
    vocab_loop: bool = True  # whether the weight gradient can be made by `vocab_loop` instead


class ChunkPlan(NamedTuple):
    """How the work of a loss head is cut.

    Without `vocab_block`, `token_loop` sums the weight gradient over the chunks of tokens. With it,
    `token_loop` runs first without that gradient; then `vocab_loop` makes it for `vocab_block`
    classes at a time, from the logits of `block_chunk_size` tokens at a time. Without
    `grads_in_forward` there is no room to save gradients between the passes: backward makes all of
    them, from logits that are computed once more.
    """

    chunk_size: int
    vocab_block: int | None = None
    block_chunk_size: int = 0
    grads_in_forward: bool = True


def plan_chunks(sizes: Sizes, max_scratch_bytes: int | None) -> ChunkPlan:
    """Cut the work of a loss head so that it stays within its budget.

    The plan is one chunk where all rows fit; else chunks besides an accumulator, where they are
    large enough to be worth it; else two loops, where they are possible. By default (None) it is
    chunks of `DEFAULT_LOGITS_BYTES`, or one chunk whose logits take up to twice the accumulator.

    Raises:
        ValueError: the budget does not hold a row and a column of logits, or without a vocabulary
            loop a row besides the accumulator; the message says what would do.
    """
    rows, vocab = sizes.rows, sizes.vocab
    logit_bytes, hidden_bytes = sizes.logit_bytes, sizes.hidden_bytes
    accumulator_bytes = sizes.accumulator_bytes
    if rows == 0:
        return ChunkPlan(1)
    # The hidden states of a chunk and their gradient.
    row_bytes = vocab * logit_bytes + 2 * hidden_bytes
    if max_scratch_bytes is None:
        default = max(accumulator_bytes + DEFAULT_LOGITS_BYTES, 2 * accumulator_bytes)
        if rows * row_bytes <= default:
            return ChunkPlan(rows)
        return ChunkPlan(_balanced(rows, max(DEFAULT_LOGITS_BYTES // row_bytes, 1)))

    free = max_scratch_bytes - sizes.fixed_bytes
    whole_bytes = rows * row_bytes + sizes.single_chunk_bytes + sizes.saved_weight_bytes
    # One column of one row, gathered, and of the float32 sum over the rows.
    column_bytes = accumulator_bytes // vocab
    least = row_bytes
    if accumulator_bytes and sizes.vocab_loop:
        least = max(least, logit_bytes + hidden_bytes + column_bytes)
    elif accumulator_bytes:
        least = min(whole_bytes, accumulator_bytes + row_bytes)
    saved_bytes = sizes.saved_hidden_bytes
    grads_in_forward = 2 * saved_bytes <= free and least <= free - saved_bytes
    if grads_in_forward:
        free -= saved_bytes
    else:
        whole_bytes -= sizes.saved_weight_bytes
    if free < least:
        beside = sizes.fixed_bytes + least - row_bytes
        raise ValueError(
            f"loss head: max_scratch_bytes={max_scratch_bytes} is too small for {rows} tokens; it "
            f"must hold a row of logits and {beside} bytes beside it: at least {beside + row_bytes}"
        )
    if whole_bytes <= free:
        return ChunkPlan(rows, grads_in_forward=grads_in_forward)
    accumulated = (free - accumulator_bytes) // row_bytes
    if not (accumulator_bytes and sizes.vocab_loop) or accumulated >= MIN_ACCUMULATED_ROWS:
        return ChunkPlan(_balanced(rows, accumulated), grads_in_forward=grads_in_forward)

    block_rows = rows
    while True:
        sum_bytes = column_bytes if block_rows < rows else 0
        columns = (free - block_rows * hidden_bytes) // (block_rows * logit_bytes + sum_bytes)
        if columns >= min(128, vocab) or block_rows == 1:
            break
        block_rows = -(-block_rows // 2)
    chunk_size, vocab_block = _balanced(rows, free // row_bytes), _balanced(vocab, columns)
    return ChunkPlan(chunk_size, vocab_block, block_rows, grads_in_forward)


def _balanced(total: int, most: int) -> int:
    """The length of pieces of at most `most`, as few as can be and as equal as the step allows.

    A short last piece of a few would cost nearly as much as a whole one. The step is what matrix
    products like: 128, or 8 where pieces are shorter.
    """
    if most >= total:
        return total
    step = 128 if most >= 128 else 8 if most >= 8 else 1
    most -= most % step
    pieces = -(-total // most)
    length = -(-total // pieces)
    return length + -length % step


def chunks(rows: int, chunk_size: int) -> list[slice]:
    """The chunks of rows, at least one.

    torch.compile makes one graph for all `rows` of as many chunks: a range to `rows` would fix it.
    """
    starts = [i * chunk_size for i in range(max(1, -(-rows // chunk_size)))]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows])]
