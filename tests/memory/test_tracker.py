"""The counts of single operators; test_simulate.py compares whole steps with real ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ligermodels.memory.rates import Work
from ligermodels.memory.tracker import Tracker

MIB = 2**20


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_gpu_rounds_bytes_and_each_stream_has_memory_of_its_own() -> None:
    tracker = Tracker("cuda")
    with tracker:
        x = meta(100)
        assert (tracker.bytes, tracker.reserved) == (512, 2 * MIB)
        with tracker.on_stream("copy"):
            y = meta(100)
        assert (tracker.bytes, tracker.reserved) == (1024, 4 * MIB)
        assert tracker.block_bytes(y) == 512
        del x, y
        z = meta(100)  # it takes the block that x left
        assert (tracker.bytes, tracker.reserved) == (512, 4 * MIB)
        del z


@pytest.mark.parametrize(
    ("run", "work"),
    [
        (lambda a, b: a @ b, Work(product_flops=2 * 4 * 8 * 16)),
        (lambda a, b: a + 1, Work(moved_bytes=2 * 4 * 8 * 4)),
        (lambda a, b: a.t(), Work()),
        (lambda a, b: torch.empty_like(a), Work()),
        (lambda a, b: a.add_(1), Work(moved_bytes=2 * 4 * 8 * 4)),
        (lambda a, b: a[torch.zeros(2, dtype=torch.int64, device="meta")], None),
    ],
)
def test_work(run, work) -> None:
    a, b = meta(4, 8), meta(8, 16)
    tracker = Tracker("cpu")
    with tracker:
        run(a, b)
    if work is None:  # a lookup moves the rows that it takes, and the index is filled
        assert 2 * 2 * 8 * 4 <= tracker.work.moved_bytes < 2 * 2 * 8 * 4 + 64
    else:
        assert tracker.work == work


def test_a_launch_moves_its_tensors_and_scratch_counts_for_the_peak() -> None:
    tracker = Tracker("cuda")
    x = meta(1000)
    tracker.launched([x, 3, None])
    assert tracker.work.moved_bytes == 4000
    table, ids = meta(50, 64), torch.zeros(4000, dtype=torch.int64, device="meta")
    tracker.hold([table, ids])
    with tracker:
        grad = torch.ops.aten.embedding_dense_backward(meta(4000, 64), ids, 50, -1, False)
    # The ids are sorted, in nine arrays.
    assert tracker.phase.peak - tracker.bytes >= 9 * 4000 * 8
    assert grad.shape == (50, 64)
