"""The arithmetic of cutting a loss head: within the budget, and in pieces worth having."""

from __future__ import annotations

import pytest

from ligermodels.kernels.linear_cross_entropy.chunk_plan import (
    DEFAULT_LOGITS_BYTES,
    MIN_ACCUMULATED_ROWS,
    ChunkPlan,
    Sizes,
    plan_chunks,
)

MIB = 2**20


def head(rows: int, width: int, vocab: int, gathered: bool = False) -> Sizes:
    """A bfloat16 head on a GPU whose weight gradient is wanted."""
    return Sizes(
        rows,
        vocab,
        logit_bytes=2,
        hidden_bytes=2 * width if gathered else 0,
        accumulator_bytes=4 * vocab * width,
        saved_weight_bytes=2 * vocab * width,
        fixed_bytes=64 * rows,
    )


def scratch(sizes: Sizes, plan: ChunkPlan) -> int:
    """Bytes that a plan takes at the most, counted anew."""
    vocab, logit, hidden = sizes.vocab, sizes.logit_bytes, sizes.hidden_bytes
    beside = sizes.fixed_bytes + (sizes.saved_hidden_bytes if plan.grads_in_forward else 0)
    rows = min(plan.chunk_size, sizes.rows)
    token_loop = rows * (vocab * logit + 2 * hidden)
    if plan.vocab_block is not None:
        block_rows = plan.block_chunk_size
        wide = sizes.accumulator_bytes // vocab if block_rows < sizes.rows else 0
        vocab_loop = plan.vocab_block * (block_rows * logit + wide) + block_rows * hidden
        return beside + max(token_loop, vocab_loop)
    if plan.chunk_size < sizes.rows:
        return beside + token_loop + sizes.accumulator_bytes
    return beside + token_loop + (sizes.saved_weight_bytes if plan.grads_in_forward else 0)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("budget", [16, 32, 64, 300, 1000, 3000, 10000])
@pytest.mark.parametrize("vocab", [32000, 128256, 262208])
@pytest.mark.parametrize("width", [576, 2304, 16384])
@pytest.mark.parametrize("rows", [1, 1000, 8192, 131072])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_plan_keeps_its_budget(rows, width, vocab, budget, gathered, keeps) -> None:
    sizes = head(rows, width, vocab, gathered)._replace(saved_hidden_bytes=2 * rows * width * keeps)
    plan = plan_chunks(sizes, budget * MIB)
    assert scratch(sizes, plan) <= budget * MIB
    assert plan.grads_in_forward or 2 * sizes.saved_hidden_bytes > budget * MIB - sizes.fixed_bytes
    if plan.vocab_block is not None:
        # A block is as tall as it may be and no narrower than matrix products like, or all there is
        assert plan.vocab_block >= 128 or plan.block_chunk_size == 1 or not gathered
        covered = -(-rows // plan.block_chunk_size) * plan.block_chunk_size
        assert covered >= rows


def test_one_chunk_where_all_rows_fit() -> None:
    sizes = head(1000, 64, 5000)
    enough = 64 * 1000 + 2 * 1000 * 5000 + 2 * 5000 * 64
    assert plan_chunks(sizes, enough) == ChunkPlan(1000)
    assert plan_chunks(sizes, enough - 1) != ChunkPlan(1000)
    assert plan_chunks(sizes, None) == ChunkPlan(1000)


def test_the_gradient_held_for_backward_counts() -> None:
    """Few rows: their logits are small, but a single chunk holds a whole weight gradient."""
    sizes = head(16, 4096, 128256)
    assert plan_chunks(sizes, 100 * MIB).vocab_block is not None
    assert plan_chunks(sizes._replace(saved_weight_bytes=0), 100 * MIB) == ChunkPlan(16)


def test_gradients_wait_for_backward_where_forward_could_not_keep_them() -> None:
    sizes = head(8192, 4096, 128256)._replace(saved_hidden_bytes=2 * 8192 * 4096)
    assert plan_chunks(sizes, 128 * MIB + sizes.fixed_bytes).grads_in_forward
    assert not plan_chunks(sizes, 127 * MIB).grads_in_forward
    assert plan_chunks(sizes, None).grads_in_forward


def test_accumulation_where_enough_rows_fit_beside_the_sum() -> None:
    sizes = head(10000, 512, 32000)
    worth = sizes.fixed_bytes + sizes.accumulator_bytes + 2 * 32000 * MIN_ACCUMULATED_ROWS
    assert plan_chunks(sizes, worth) == ChunkPlan(MIN_ACCUMULATED_ROWS)
    assert plan_chunks(sizes, worth - 1).vocab_block is not None
    for budget in (worth + 10**7, worth + 10**8):
        plan = plan_chunks(sizes, budget)
        assert plan.vocab_block is None and plan.chunk_size % 128 == 0
        assert scratch(sizes, plan) <= budget
        fewer = -(-10000 // plan.chunk_size) - 1
        longer = -(-10000 // (128 * fewer)) * 128
        assert scratch(sizes, ChunkPlan(longer)) > budget


def test_no_weight_gradient_needs_no_second_loop() -> None:
    sizes = head(10000, 512, 32000)._replace(accumulator_bytes=0, saved_weight_bytes=0)
    assert plan_chunks(sizes, 64 * 10000 + 2 * 32000 * 5) == ChunkPlan(5)


def test_default() -> None:
    """2^30 bytes of logits, whatever the vocabulary; one chunk where that is cheaper."""
    for vocab in (32000, 128256, 151936, 256000):
        for width in (576, 4096, 8192):
            plan = plan_chunks(head(10**6, width, vocab), None)
            assert plan.vocab_block is None and plan.chunk_size % 128 == 0
            assert DEFAULT_LOGITS_BYTES * 0.9 < plan.chunk_size * vocab * 2 <= DEFAULT_LOGITS_BYTES
    assert plan_chunks(head(512, 4096, 128256), None) == ChunkPlan(512)
    # Logits of 3.9 GiB: less than twice the float32 sum of a gradient of 256000 x 2304.
    assert plan_chunks(head(8192, 2304, 256000), None) == ChunkPlan(8192)
    assert plan_chunks(head(16384, 2304, 256000), None).chunk_size < 8192


@pytest.mark.parametrize("budget", [None, 300 * MIB, 3000 * MIB])
@pytest.mark.parametrize("vocab, width", [(128256, 2048), (32000, 4096)])
@pytest.mark.parametrize("rows", [8300, 16800, 34000])
def test_no_piece_is_much_shorter_than_the_rest(rows, vocab, width, budget) -> None:
    plan = plan_chunks(head(rows, width, vocab), budget)
    for total, length in ((rows, plan.chunk_size), (vocab, plan.vocab_block or vocab)):
        pieces = -(-total // length)
        last = total - (pieces - 1) * length
        assert length - last < 128 * pieces
        if budget != 300 * MIB:  # there the pieces are many and the step is much of one
            assert last > 0.8 * length


def test_a_row_larger_than_the_default_still_works() -> None:
    assert plan_chunks(Sizes(10, 2**30, 2), None) == ChunkPlan(1)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("vocab, width", [(1, 1), (3, 2000), (2000, 3), (51, 14)])
def test_too_small_a_budget_names_the_least(vocab, width, gathered) -> None:
    sizes = head(100, width, vocab, gathered)
    with pytest.raises(ValueError, match="at least") as error:
        plan_chunks(sizes, 1)
    least = int(str(error.value).split()[-1])
    plan = plan_chunks(sizes, least)
    assert plan.chunk_size >= 1 and scratch(sizes, plan) <= least
    with pytest.raises(ValueError, match=f"at least {least}$"):
        plan_chunks(sizes, least - 1)


def test_nothing_to_do() -> None:
    assert plan_chunks(head(0, 64, 1000), None) == ChunkPlan(1)
    assert plan_chunks(head(0, 64, 1000), 10**6) == ChunkPlan(1)
