"""What stands in for a device; test_simulate.py compares whole steps with real ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ligermodels.kernels.dispatch import simulating
from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory.simulated_device import Autocast, SimulatedDevice
from ligermodels.memory.tracker import Tracker


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def device(kind: str, autocast: torch.dtype | None = None) -> SimulatedDevice:
    return SimulatedDevice(torch.device(kind), autocast, Tracker(kind))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("options", [{}, {"window": 16}, {"softcap": 30.0}])
def test_attention_allocates_its_output_and_counts_its_pairs(kind, options) -> None:
    simulator = device(kind)
    q, k = meta(2, 4, 64, 32), meta(2, 2, 64, 32)
    with simulator.tracker, simulating(simulator):
        out = attend(q, k, k, AttentionMask(64), scale=0.1, **options)
        assert out.shape == q.shape and out.is_meta
        window = options.get("window", 64)
        pairs = sum(min(i + 1, window) for i in range(64))
        assert simulator.tracker.work.attention.total() == 4 * 2 * 4 * pairs * 32
        out.backward(torch.empty_like(out))
        assert simulator.tracker.work.attention.total() == 14 * 2 * 4 * pairs * 32
    assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape


def test_autocast_casts_products_and_keeps_the_casts_of_weights() -> None:
    simulator = device("cuda", torch.bfloat16)
    x, weight = meta(4, 8), meta(16, 8)
    with Autocast(simulator) as casts, simulating(simulator):
        assert torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
        first = casts.casts[id(weight)]
        torch.nn.functional.linear(x, weight)
        assert casts.casts[id(weight)] is first
        with simulator.without_autocast():
            assert torch.nn.functional.linear(x, weight).dtype == torch.float32
