"""How the loss head is cut: how many logits exist at once, from the sizes and a byte budget."""

from typing import NamedTuple

from ligermodels.kernels.checks import check_count

DEFAULT_LOGITS_BYTES = 2**30
"""Default scratch for logits; the float32 accumulator of the weight gradient comes on top."""

MIN_ACCUMULATED_ROWS = 768
"""Fewest rows a chunk must have for accumulating the weight gradient to beat recomputing logits.

Adding a chunk of c rows reads and writes the accumulator, 8 * vocab * in bytes; making its logits
again costs 2 * c * vocab * in operations. At 4.3 TB/s and 700 TFLOP/s they are equal at c = 650.
"""

TOKEN_BYTES = 64
"""Scratch for each token: loss, z-loss, logsumexp, masks, float32 or int64, joined from parts."""


def check_cut(
    chunk_size: int | None, max_scratch_bytes: int | None
) -> tuple[int | None, int | None]:
    """Both as ints or None; raise ValueError for one that is no positive integer."""
    if chunk_size is not None:
        chunk_size = check_count("loss head", "chunk_size", chunk_size, 1)
    if max_scratch_bytes is not None:
        max_scratch_bytes = check_count("loss head", "max_scratch_bytes", max_scratch_bytes, 1)
    return chunk_size, max_scratch_bytes


class Sizes(NamedTuple):
    """What a loss head needs memory for."""

    rows: int  # tokens that logits are made for
    vocab: int
    logit_bytes: int  # for each logit of a chunk
    hidden_bytes: int = 0  # for each row of a chunk whose hidden states are gathered
    accumulator_bytes: int = 0  # to sum the weight gradient over chunks; 0 where none is wanted
    whole_bytes: int = 0  # beside a single chunk, in whatever pass
    held_bytes: int = 0  # weight gradient that a single chunk holds from forward to backward
    kept_bytes: int = 0  # hidden gradient that forward makes and keeps for backward
    fixed_bytes: int = 0  # whatever the chunk
    second_loop: bool = True  # whether the weight gradient can be made by columns instead


class Plan(NamedTuple):
    """How a loss head is cut.

    Without `columns` the weight gradient is summed over the chunks of rows. With it, the rows pass
    first without it; then a second loop makes it for `columns` classes at a time from the logits
    of `column_rows` rows at a time. Without `in_forward` there is no room for gradients between the
    passes, and backward makes all of them, from logits made once more.
    """

    rows: int
    columns: int | None = None
    column_rows: int = 0
    in_forward: bool = True


def plan_chunks(sizes: Sizes, max_scratch_bytes: int | None) -> Plan:
    """Cut a loss head so that it stays within its budget.

    One chunk where all rows fit; else chunks beside an accumulator where they are large enough to
    be worth it; else two loops, where they are possible. By default (None), chunks of
    `DEFAULT_LOGITS_BYTES`, or one chunk whose logits take up to twice the accumulator.

    Raises:
        ValueError: the budget does not hold a row and a column of logits, or without a second
            loop a row beside the accumulator; says what would.
    """
    rows, vocab = sizes.rows, sizes.vocab
    logit_bytes, hidden_bytes = sizes.logit_bytes, sizes.hidden_bytes
    accumulator_bytes = sizes.accumulator_bytes
    if rows == 0:
        return Plan(1)
    # The hidden states of a chunk and their gradient.
    row_bytes = vocab * logit_bytes + 2 * hidden_bytes
    if max_scratch_bytes is None:
        default = max(accumulator_bytes + DEFAULT_LOGITS_BYTES, 2 * accumulator_bytes)
        if rows * row_bytes <= default:
            return Plan(rows)
        return Plan(_balanced(rows, max(DEFAULT_LOGITS_BYTES // row_bytes, 1)))

    free = max_scratch_bytes - sizes.fixed_bytes
    whole_bytes = rows * row_bytes + sizes.whole_bytes + sizes.held_bytes
    # One column of one row, gathered, and of the float32 sum over the rows.
    column_bytes = accumulator_bytes // vocab
    least = row_bytes
    if accumulator_bytes and sizes.second_loop:
        least = max(least, logit_bytes + hidden_bytes + column_bytes)
    elif accumulator_bytes:
        least = min(whole_bytes, accumulator_bytes + row_bytes)
    in_forward = 2 * sizes.kept_bytes <= free and least <= free - sizes.kept_bytes
    if in_forward:
        free -= sizes.kept_bytes
    else:
        whole_bytes -= sizes.held_bytes
    if free < least:
        beside = sizes.fixed_bytes + least - row_bytes
        raise ValueError(
            f"loss head: max_scratch_bytes={max_scratch_bytes} is too small for {rows} tokens; it "
            f"must hold a row of logits and {beside} bytes beside it: at least {beside + row_bytes}"
        )
    if whole_bytes <= free:
        return Plan(rows, in_forward=in_forward)
    beside = (free - accumulator_bytes) // row_bytes
    if not (accumulator_bytes and sizes.second_loop) or beside >= MIN_ACCUMULATED_ROWS:
        return Plan(_balanced(rows, beside), in_forward=in_forward)

    column_rows = rows
    while True:
        sum_bytes = column_bytes if column_rows < rows else 0
        columns = (free - column_rows * hidden_bytes) // (column_rows * logit_bytes + sum_bytes)
        if columns >= min(128, vocab) or column_rows == 1:
            break
        column_rows = -(-column_rows // 2)
    row_chunk, columns = _balanced(rows, free // row_bytes), _balanced(vocab, columns)
    return Plan(row_chunk, columns, column_rows, in_forward)


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
