"""The pool of pinned memory: blocks are disjoint, within the budget, and come back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ligermodels.memory.byte_sizes import MIB
from ligermodels.memory.host_memory import PinnedPool


@pytest.mark.parametrize("sizes", [(1, 60 * MIB), (8 * MIB, 8 * MIB)], ids=["any", "equal"])
def test_the_pool_gives_disjoint_memory_within_its_budget(sizes: tuple[int, int]) -> None:
    """Pieces of equal size take the places of others exactly."""
    choose = random.Random(0)
    budget = 700 * MIB
    slabs: list[int] = []
    pool = PinnedPool(budget, lambda nbytes: slabs.append(nbytes))
    taken: list[tuple[int, list]] = []
    for _ in range(3000):
        if taken and choose.random() < 0.5:
            pool.give_back(taken.pop(choose.randrange(len(taken)))[1])
            continue
        nbytes = choose.randint(*sizes)
        blocks = pool.take(nbytes)
        if blocks is None:
            assert budget - sum(-(-n // 512) * 512 for n, _ in taken) < nbytes
        else:
            taken.append((nbytes, blocks))
            assert sum(size for _, _, size in blocks) >= nbytes
        used = sorted(block for _, blocks in taken for block in blocks)
        for (slab, offset, size), (other, start, _) in pairwise(used):
            assert slab != other or offset + size <= start
        assert pool.held - pool.free_bytes() == sum(size for _, _, size in used)
    assert sum(slabs) == pool.held <= budget
    assert all(size & (size - 1) == 0 for size in slabs), "PyTorch would round it up"
    while taken:
        pool.give_back(taken.pop()[1])
    assert pool.free_bytes() == pool.held and len(pool._free) == len(slabs)
