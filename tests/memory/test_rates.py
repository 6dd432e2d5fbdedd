"""The rates that turn a step's work into seconds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.memory import rates
from ligermodels.memory.rates import Rates, data_sheet, gpu_bytes, rates_of
from ligermodels.memory.tracker import Work


def test_work_takes_the_sum_of_its_parts() -> None:
    made = Rates(products=100.0, attention=50.0, memory=10.0, host_bytes=1.0, source="a test")
    work = Work(product_flops=200, attention_flops=50, moved_bytes=5, to_host_bytes=1000)
    assert made.seconds(work) == 2.0 + 1.0 + 0.5


def test_data_sheets() -> None:
    h100, h200 = (data_sheet(f"NVIDIA {name}", torch.bfloat16) for name in ("H100 PCIe", "H200"))
    assert h200.memory > h100.memory and h200.source == "data sheet of H200"
    assert data_sheet("H100", torch.float32).products < h100.products
    assert data_sheet("another", torch.bfloat16) == data_sheet("H100", torch.bfloat16)
    assert gpu_bytes("h200") > gpu_bytes("H100") > 75 * 2**30
    with pytest.raises(ConfigError, match="gpu: 'another' is not known; expected one of H200"):
        gpu_bytes("another")


def test_a_time_is_the_median_of_the_last_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    waited = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            return 20.0 * end.at  # milliseconds; each round takes longer than the one before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runs: list[int] = []
    seconds = rates._time(lambda: runs.append(1))
    # The rounds take 20, 60, 100, 140, 180 and 220 ms; then 0.6 s are over.
    assert waited == [1, 3, 5, 7, 9, 11] and len(runs) == 6 * 10
    assert seconds == pytest.approx(0.018)


def test_a_measurement_counts_what_each_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def empty(shape: Any, *, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return real(shape, **options)

    def random(shape: Any, *, generator: torch.Generator, **options: Any) -> torch.Tensor:
        assert generator is not torch.default_generator
        return real(shape, **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "randn", random)
    monkeypatch.setattr(rates, "_time", lambda run: 0.5)
    found = rates.measure.__wrapped__(torch.device("cpu"), torch.bfloat16)
    elements = 8192 * 4096
    assert found.products == 2 * elements * 8192 / 0.5
    assert found.attention == 4 * 32 * 4096**2 * 64 / 0.5
    assert found.memory == 2 * found.host_bytes == 2 * 2 * elements / 0.5
    assert found.source == "measured on a GPU"
    monkeypatch.setattr(rates, "measure", lambda *given: given)
    cuda = torch.device("cuda")
    assert rates_of(cuda, torch.bfloat16, 64) == (cuda, torch.bfloat16, 64)


@pytest.mark.gpu
def test_measured_rates_are_near_the_data_sheet() -> None:
    state = torch.cuda.get_rng_state()
    device = torch.device("cuda")
    found = rates_of(device, torch.bfloat16)
    assert found.source == f"measured on {torch.cuda.get_device_name()}"
    assert torch.equal(torch.cuda.get_rng_state(), state)
    known = data_sheet(torch.cuda.get_device_name(), torch.bfloat16)
    for name in ("products", "attention", "memory", "host_bytes"):
        assert 0.5 < getattr(found, name) / getattr(known, name) < 2, name
