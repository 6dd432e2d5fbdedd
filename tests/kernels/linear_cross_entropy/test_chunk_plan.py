"""The plan of chunks: it stays within the budget and makes pieces that are not too small."""

from __future__ import annotations

from itertools import product

import pytest

from ligermodels.kernels.linear_cross_entropy.chunk_plan import (
    DEFAULT_LOGITS_BYTES,
    ChunkPlan,
    Sizes,
    plan_chunks,
)

MIB = 2**20


def head(rows: int, width: int, vocab: int, gathered: bool = False) -> Sizes:
    """Return the sizes of a bfloat16 head on a GPU whose weight requires a gradient."""
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
    """Return the most bytes that a plan holds at once, by a count independent of the package's."""
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
        rounded = sizes.rounded_weight_bytes if plan.grads_in_forward else 0
        return beside + max(token_loop, rounded) + sizes.accumulator_bytes
    return beside + token_loop + (sizes.saved_weight_bytes if plan.grads_in_forward else 0)


def test_a_plan_keeps_its_budget() -> None:
    budgets = [n * MIB for n in (16, 32, 64, 300, 1000, 3000, 10000)]
    for rows, width, vocab, budget, gathered, keeps, rounds in product(
        (1, 1000, 8192, 131072),
        (576, 2304, 16384),
        (32000, 128256, 262208),
        budgets,
        (False, True),
        (False, True),
        (False, True),
    ):
        saved, rounded = 2 * rows * width * keeps, 2 * vocab * width * rounds
        sizes = head(rows, width, vocab, gathered)._replace(
            saved_hidden_bytes=saved, rounded_weight_bytes=rounded
        )
        plan = plan_chunks(sizes, budget)
        case = f"{sizes}, budget {budget}: {plan}"
        assert scratch(sizes, plan) <= budget, case
        assert plan.grads_in_forward or 2 * saved > budget - sizes.fixed_bytes, case
        if plan.vocab_block is not None:
            # A block is at least as wide as matrix products need, unless it has a single row.
            assert plan.vocab_block >= 128 or plan.block_chunk_size == 1 or not gathered, case
            assert plan.block_chunk_size >= 1, case


def test_plans_at_the_edges() -> None:
    sizes = head(1000, 64, 5000)
    enough = 64 * 1000 + 2 * 1000 * 5000 + 2 * 5000 * 64
    # The logits of few rows are small, but a single chunk also holds a whole weight gradient.
    few = head(16, 4096, 128256)
    frozen = head(10000, 512, 32000)._replace(accumulator_bytes=0, saved_weight_bytes=0)
    for given, budget, plan in (
        (sizes, enough, ChunkPlan(1000)),
        (sizes, None, ChunkPlan(1000)),
        (few._replace(saved_weight_bytes=0), 100 * MIB, ChunkPlan(16)),
        (frozen, 64 * 10000 + 2 * 32000 * 5, ChunkPlan(5)),
        (Sizes(10, 2**30, 2), None, ChunkPlan(1)),  # a row larger than the default
        (head(0, 64, 1000), None, ChunkPlan(1)),
        (head(0, 64, 1000), 10**6, ChunkPlan(1)),
    ):
        assert plan_chunks(given, budget) == plan, (given, budget)
    assert plan_chunks(sizes, enough - 1) != ChunkPlan(1000)
    assert plan_chunks(few, 100 * MIB).vocab_block is not None


def test_default() -> None:
    """Chunks hold 2^30 bytes of logits for any vocabulary; one chunk is used if it is cheaper."""
    for vocab in (32000, 128256, 151936, 256000):
        for width in (576, 4096, 8192):
            plan = plan_chunks(head(10**6, width, vocab), None)
            assert plan.vocab_block is None and plan.chunk_size % 128 == 0
            assert DEFAULT_LOGITS_BYTES * 0.9 < plan.chunk_size * vocab * 2 <= DEFAULT_LOGITS_BYTES
    assert plan_chunks(head(512, 4096, 128256), None) == ChunkPlan(512)
    # The logits take 3.9 GiB, less than twice the float32 sum of the 256000 x 2304 gradient.
    assert plan_chunks(head(8192, 2304, 256000), None) == ChunkPlan(8192)
    assert plan_chunks(head(16384, 2304, 256000), None).chunk_size < 8192


def test_too_small_a_budget_names_the_least() -> None:
    for (vocab, width), gathered in product(
        ((1, 1), (3, 2000), (2000, 3), (51, 14)), (False, True)
    ):
        sizes = head(100, width, vocab, gathered)
        with pytest.raises(ValueError, match="at least") as error:
            plan_chunks(sizes, 1)
        least = int(str(error.value).split()[-1])
        plan = plan_chunks(sizes, least)
        assert plan.chunk_size >= 1 and scratch(sizes, plan) <= least, sizes
        with pytest.raises(ValueError, match=f"at least {least}$"):
            plan_chunks(sizes, least - 1)
