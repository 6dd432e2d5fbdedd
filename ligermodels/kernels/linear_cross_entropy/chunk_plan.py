"""The rows of a loss head: which ones are computed, and how many logits exist at once.

A byte budget decides how many. In instruction tuning most rows are often ignored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.checks import misfit
from ligermodels.kernels.dispatch import choose, real_device
from ligermodels.kernels.loss_options import LossOptions, TokenRequest

DEFAULT_LOGITS_BYTES = 2**30
"""Default budget for logits. The float32 accumulator of the weight gradient is not part of it."""

MIN_ACCUMULATED_ROWS = 768
"""The fewest rows of a chunk for which it is faster to accumulate the weight gradient than to
recompute the logits.

To add the product of a chunk of c rows, the GPU reads and writes the accumulator: 8 * vocab * in
bytes. To recompute the chunk's logits it does 2 * c * vocab * in operations. At 4.3 TB/s and 700
TFLOP/s both take the same time at c = 650.
"""

TOKEN_BYTES = 64
"""Scratch bytes for each token: loss, z-loss, logsumexp and masks, in float32 or int64, and the
copies that exist while the values of the chunks are concatenated."""


def wide_copies(hidden: Tensor, request: TokenRequest) -> tuple[int, int]:
    """Return how many copies of logits in `compute_dtype` exist at the peak of memory.

    The first number counts copies of a chunk's logits, the second one further copies of one row's.
    """
    if choose(hidden.device, hidden.dtype)[0] == "triton":
        return 0, 0  # the kernels overwrite the logits
    # The most that any other options need.
    most = 7 + 2 * (not request.is_empty) + 2 * ("sum_sq_probs" in request.stats)
    if real_device(hidden.device).type != "cpu" or torch.compiler.is_compiling():
        return most, 0
    # On a CPU the reference computes blocks of at most a sixteenth of the chunk, or of one row.
    return 1, most - 1


def shard_copies(options: LossOptions, request: TokenRequest) -> int:
    """Return how many copies of the logits in `compute_dtype` `ShardedRows` makes at its peak.

    Without an option that needs all of them, it only calls the kernel.
    """
    return 6 if not request.is_empty else 3 if options.label_smoothing else 0


class Sizes(NamedTuple):
    """The sizes that a chunk plan depends on."""

    rows: int  # tokens whose logits are computed
    vocab: int
    logit_bytes: int  # bytes for each logit of a chunk, copies included
    hidden_bytes: int = 0  # bytes for the hidden states of each row of a chunk, if they are copied
    accumulator_bytes: int = 0  # sum of the weight gradient over chunks; 0 without that gradient
    single_chunk_bytes: int = 0  # in addition to the logits, if there is a single chunk
    saved_weight_bytes: int = 0  # weight gradient that forward saves, if there is a single chunk
    rounded_weight_bytes: int = 0  # weight gradient that is made of the sum when no logits are left
    saved_hidden_bytes: int = 0  # hidden gradient that forward saves for backward
    fixed_bytes: int = 0  # memory that does not depend on the plan
    ahead_bytes: int = 0  # for each row of a next chunk whose logits are computed beside a chunk's
    vocab_loop: bool = True  # whether `vocab_loop` may compute the weight gradient instead


class ChunkPlan(NamedTuple):
    """The division of a loss head's work.

    If `vocab_block` is None, `token_loop` sums the weight gradient over chunks of tokens. Otherwise
    `token_loop` runs without that gradient. `vocab_loop` then computes it for `vocab_block` classes
    at a time, from the logits of `block_chunk_size` tokens at a time. If `grads_in_forward` is
    False, there is no memory to save gradients between the passes: backward recomputes the logits
    and computes all gradients. If `round_weight_grad` is True, forward rounds the sum of the weight
    gradient to the weight's dtype before it is saved.
    """

    chunk_size: int
    vocab_block: int | None = None
    block_chunk_size: int = 0
    grads_in_forward: bool = True
    round_weight_grad: bool = False


def plan_chunks(sizes: Sizes, max_scratch_bytes: int | None) -> ChunkPlan:
    """Split the work of a loss head so that it stays within its budget.

    If all rows fit, the plan is one chunk. Otherwise it is chunks and an accumulator, if the chunks
    have at least `MIN_ACCUMULATED_ROWS` rows and the rounded gradient fits beside the accumulator;
    otherwise two loops, if `vocab_loop` is possible.
    Without a budget (None), the plan is one chunk if all logits take at most the accumulator plus
    `DEFAULT_LOGITS_BYTES`, or at most twice the accumulator. Otherwise it is chunks whose logits
    take `DEFAULT_LOGITS_BYTES`, or as much as the weight gradient that is made of the sum later.

    Raises:
        ValueError: the budget cannot hold one row and one column of logits, or, without a
            vocabulary loop, one row and the accumulator. The message gives the smallest budget.
    """
    rows, vocab = sizes.rows, sizes.vocab
    logit_bytes, hidden_bytes = sizes.logit_bytes, sizes.hidden_bytes
    accumulator_bytes = sizes.accumulator_bytes
    if rows == 0:
        return ChunkPlan(1)
    # hidden_bytes counts twice: for the hidden states of a chunk and for their gradient.
    row_bytes = vocab * logit_bytes + 2 * hidden_bytes
    whole_bytes = rows * row_bytes + sizes.single_chunk_bytes + sizes.saved_weight_bytes
    if rows > 1:
        row_bytes += sizes.ahead_bytes  # from here on, of one of several chunks
    if max_scratch_bytes is None:
        default = max(accumulator_bytes + DEFAULT_LOGITS_BYTES, 2 * accumulator_bytes)
        if rows * (vocab * logit_bytes + 2 * hidden_bytes) <= default:
            return ChunkPlan(rows)
        logits = max(DEFAULT_LOGITS_BYTES, sizes.rounded_weight_bytes)
        return ChunkPlan(balanced(rows, max(logits // row_bytes, 1)))

    free = max_scratch_bytes - sizes.fixed_bytes
    # `vocab_loop` needs at least one logit, one row of hidden states and one column of the sum.
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
            f"must hold a row of logits and {beside} more bytes: pass at least {beside + row_bytes}"
        )
    if whole_bytes <= free:
        return ChunkPlan(rows, grads_in_forward=grads_in_forward)
    accumulated = (free - accumulator_bytes) // row_bytes
    worth = accumulated >= MIN_ACCUMULATED_ROWS
    if grads_in_forward:  # forward makes the rounded gradient, which backward would return
        worth = worth and accumulator_bytes + sizes.rounded_weight_bytes <= free
    if worth or not (accumulator_bytes and sizes.vocab_loop):
        return ChunkPlan(balanced(rows, accumulated), grads_in_forward=grads_in_forward)

    block_rows = rows
    while True:
        sum_bytes = column_bytes if block_rows < rows else 0
        columns = (free - block_rows * hidden_bytes) // (block_rows * logit_bytes + sum_bytes)
        if columns >= min(128, vocab) or block_rows == 1:
            break
        block_rows = -(-block_rows // 2)
    chunk_size, vocab_block = balanced(rows, free // row_bytes), balanced(vocab, columns)
    return ChunkPlan(chunk_size, vocab_block, block_rows, grads_in_forward)


def smaller_chunk(sizes: Sizes) -> int | None:
    """Return the chunk whose logits take `DEFAULT_LOGITS_BYTES`, if the default plan's is larger.

    It needs less memory and more time, because the weight gradient is accumulated chunk by chunk.
    """
    row_bytes = sizes.vocab * sizes.logit_bytes + sizes.ahead_bytes
    most = max(DEFAULT_LOGITS_BYTES // row_bytes, 1)
    chunk = balanced(sizes.rows, most)
    return chunk if chunk < plan_chunks(sizes, None).chunk_size else None


def balanced(total: int, most: int) -> int:
    """Return the length of the fewest pieces of at most `most`, nearly equal in length.

    Equal pieces avoid a short last piece, which would cost nearly as much time as a whole one. The
    length is a multiple of 128, or of 8 below 128, because matrix products are fast at these sizes.
    """
    if most >= total:
        return total
    step = 128 if most >= 128 else 8 if most >= 8 else 1
    most -= most % step
    pieces = -(-total // most)
    length = -(-total // pieces)
    return length + -length % step


def chunks(rows: int, chunk_size: int) -> list[slice]:
    """Return the chunks of rows, at least one.

    torch.compile reuses one graph for all values of `rows` that give the same number of chunks.
    `range(0, rows, chunk_size)` would compile one graph for each value.
    """
    starts = [i * chunk_size for i in range(max(1, -(-rows // chunk_size)))]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows])]


def valid_rows(targets: Tensor, options: LossOptions) -> tuple[Tensor | None, Tensor]:
    """Return the positions of the rows to compute, or None to take all, and their targets.

    With skip_ignored, these are the targets that are not ignored. Without max_valid, one host
    synchronisation counts them. With max_valid there is none, and min(max_valid, targets) rows; the
    padding at the end has a position outside and ignore_index. If the bound is too small, `scatter`
    gives NaN for the rows that do not fit.

    Args: targets: (...) int64.
    Returns: int64 (rows) or None, and int64 (rows).
    Raises:
        ValueError: max_valid is too small. Only CPU eager mode checks this.
        RuntimeError: max_valid is missing under torch.compile or CUDA graph capture.
    """
    targets, ignore_index = targets.flatten(), options.ignore_index
    rows, max_valid = len(targets), options.max_valid
    if not options.skip_ignored or rows == 0:
        return None, targets
    valid = targets != ignore_index
    compiling = torch.compiler.is_compiling()
    if max_valid is None:
        if compiling or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise RuntimeError(
                "loss head: skip_ignored counts the targets on the host, and torch.compile and "
                "CUDA graph capture do not allow that; pass max_valid, an upper bound on the "
                "number of targets that are not ignored"
            )
        index = valid.nonzero().squeeze(1)
        return index, targets[index]
    if targets.device.type == "cpu" and not compiling and int(valid.sum()) > max_valid:
        expected = f"at least the {int(valid.sum())} targets other than {ignore_index=}"
        raise misfit("loss head", expected, max_valid=max_valid)
    index = torch.nonzero_static(valid, size=min(max_valid, rows), fill_value=rows).squeeze(1)
    return index, torch.where(index < rows, targets[index.clamp(max=rows - 1)], ignore_index)


def gather(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows of x at these positions; padding is exactly zero. None takes all rows."""
    if index is None:
        return x
    gathered = x.index_select(0, index.clamp(max=len(x) - 1))
    return gathered.masked_fill(index[:, None] == len(x), 0.0)


def scatter(values: Tensor, index: Tensor | None, targets: Tensor, ignore_index: int) -> Tensor:
    """Put the values (rows) or (rows, k) of gathered rows back: (...) or (..., k) as the targets.

    This is differentiable with respect to values. A row that was not gathered gets 0 if its target
    is ignored, and NaN otherwise.
    """
    shape = targets.shape + values.shape[1:]
    if index is not None:
        flat = targets.flatten()
        rows = values.new_zeros(len(flat) + 1, *values.shape[1:])  # one more for the padding
        if values.is_floating_point():
            wanted = (flat != ignore_index).view(-1, *[1] * (values.dim() - 1))
            rows[:-1].masked_fill_(wanted, float("nan"))
        values = rows.index_copy(0, index, values)[:-1]
    # FSDP2 warns of outputs of a model that are views. A few numbers of each token are soon copied.
    return values.view(shape).clone()


def zeros_to_scatter_into(hidden: Tensor) -> Tensor:
    """Return zeros for the gradients of gathered rows: hidden's shape and a row for padding."""
    return hidden.new_zeros(len(hidden) + 1, hidden.shape[1])
