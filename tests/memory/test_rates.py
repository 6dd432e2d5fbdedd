"""The rates that turn a step's work into seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.memory import rates
from ligermodels.memory.attention_rates import AttentionKind
from ligermodels.memory.rates import Rates, data_sheet, gpu_bytes, rates_of
from ligermodels.memory.tracker import Work


def test_work_takes_the_sum_of_its_parts() -> None:
    made = Rates(products=100.0, attention=50.0, memory=10.0, host_bytes=1.0, source="a test")
    kind = AttentionKind("sdpa", 8, 2, 64, 128)
    attention = Counter({(kind, "forward"): 50, (kind, "backward"): 100})
    work = Work(200, attention, moved_bytes=5, to_host_bytes=1000)
    assert made.seconds(work) == 2.0 + 3.0 + 0.5
    by_pass = replace(
        made, attention=lambda kind, direction: {"forward": 25, "backward": 10}[direction]
    )
    assert by_pass.seconds(work + work) == 2 * (2.0 + 2.0 + 10.0 + 0.5)


def test_products_between_other_work_are_faster() -> None:
    made = Rates(products=100.0, attention=50.0, memory=10.0, host_bytes=1.0, source="a test")
    kind = AttentionKind("sdpa", 8, 2, 64, 128)

    def products(share: float) -> float:
        attention = Counter({(kind, "forward"): round(50 * 1000 * (1 - share))})
        return mixed.in_step(Work(round(100 * 1000 * share), attention)).products

    mixed = replace(made, mixed_products=120.0)
    found = [products(share) for share in (1.0, 0.75, 0.5, 0.1)]
    assert found == pytest.approx([100.0, 110.0, 120.0, 120.0])
    assert made.in_step(Work()).products == 100.0


def test_data_sheets() -> None:
    h100, h200 = (data_sheet(f"NVIDIA {name}", torch.bfloat16) for name in ("H100 PCIe", "H200"))
    assert h200.memory > h100.memory and h200.source == "data sheet of H200"
    assert data_sheet("H100", torch.float32).products < h100.products
    assert data_sheet("another", torch.bfloat16) == data_sheet("H100", torch.bfloat16)
    assert rates.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert rates.peak_flops("GeForce") is None
    assert gpu_bytes("h200") > gpu_bytes("H100") > 75 * 2**30
    with pytest.raises(ConfigError, match="gpu: 'another' is not known; expected one of H200"):
        gpu_bytes("another")


def fake_events(monkeypatch: pytest.MonkeyPatch, elapsed: Callable[[int], float]) -> list[str]:
    """Replace the events of a GPU; return a list of what happens to them, in order."""
    clock, order = iter(range(10**6)), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)
            order.append("event")

        def synchronize(self) -> None:
            order.append(f"waited for {self.at}")

        def elapsed_time(self, end: Event) -> float:
            return elapsed(end.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return order


def test_a_time_is_the_median_of_the_last_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    order = fake_events(monkeypatch, lambda at: 20.0 * at)  # milliseconds; each takes longer
    seconds = rates._seconds(lambda: order.append("run"))
    # The rounds take 20, 60, 100, 140, 180 and 220 ms; then 0.6 s are over.
    waited = [x for x in order if x.startswith("waited")]
    assert waited == [f"waited for {at}" for at in (1, 3, 5, 7, 9, 11)]
    assert order.count("run") == 6 * 10 and seconds == pytest.approx(0.018)
    order = fake_events(monkeypatch, lambda at: 400.0)
    rates._seconds(lambda: order.append("run"), between=lambda: order.append("other"))
    assert order[-23:-1] == ["other"] * 10 + ["event"] + ["run"] * 10 + ["event"]


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

    def seconds(run: object, between: object = None) -> float:
        return 0.5 if between is None else 0.4

    monkeypatch.setattr(rates, "_seconds", seconds)
    monkeypatch.setattr(rates, "measured_rates", lambda *given: given[:2])
    found = rates.measure.__wrapped__(torch.device("cpu"), torch.bfloat16)
    elements = 8192 * 4096
    assert found.products == 2 * elements * 8192 / 0.5
    assert found.mixed_products == 2 * elements * 8192 / 0.4
    assert callable(found.attention)
    given = found.attention("a kind", "forward"), found.attention("a kind", "backward")
    assert given == ("a kind", torch.device("cpu"))
    assert found.memory == 2 * found.host_bytes == 2 * 2 * elements / 0.5
    assert found.source == "measured on a GPU"
    monkeypatch.setattr(rates, "measure", lambda *given: given)
    cuda = torch.device("cuda")
    assert rates_of(cuda, torch.bfloat16) == (cuda, torch.bfloat16)


@pytest.mark.gpu
def test_measured_rates_are_near_the_data_sheet() -> None:
    state = torch.cuda.get_rng_state()
    device = torch.device("cuda")
    found = rates_of(device, torch.bfloat16)
    assert found.source == f"measured on {torch.cuda.get_device_name()}"
    assert torch.equal(torch.cuda.get_rng_state(), state)
    known = data_sheet(torch.cuda.get_device_name(), torch.bfloat16)
    for name in ("products", "memory", "host_bytes"):
        assert 0.5 < getattr(found, name) / getattr(known, name) < 2, name
