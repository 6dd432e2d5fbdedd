"""The rates that turn a step's work into seconds."""

from __future__ import annotations

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.memory.rates import Rates, data_sheet, gpu_bytes, rates_of
from ligermodels.memory.tracker import Work


def test_work_takes_the_sum_of_its_parts() -> None:
    rates = Rates(products=100.0, attention=50.0, memory=10.0, host_bytes=1.0, source="a test")
    work = Work(product_flops=200, attention_flops=50, moved_bytes=5, to_host_bytes=1000)
    assert rates.seconds(work) == 2.0 + 1.0 + 0.5


def test_data_sheets() -> None:
    h100, h200 = (data_sheet(f"NVIDIA {name}", torch.bfloat16) for name in ("H100 PCIe", "H200"))
    assert h200.memory > h100.memory and h200.source == "data sheet of H200"
    assert data_sheet("H100", torch.float32).products < h100.products
    assert data_sheet("another", torch.bfloat16) == data_sheet("H100", torch.bfloat16)
    assert gpu_bytes("h200") > gpu_bytes("H100") > 75 * 2**30
    with pytest.raises(ConfigError, match="gpu: 'another' is not known; expected one of H200"):
        gpu_bytes("another")


@pytest.mark.gpu
def test_measured_rates_are_near_the_data_sheet() -> None:
    state = torch.cuda.get_rng_state()
    device = torch.device("cuda")
    rates = rates_of(device, torch.bfloat16)
    assert rates.source == f"measured on {torch.cuda.get_device_name()}"
    assert torch.equal(torch.cuda.get_rng_state(), state)
    known = data_sheet(torch.cuda.get_device_name(), torch.bfloat16)
    for name in ("products", "attention", "memory", "host_bytes"):
        assert 0.5 < getattr(rates, name) / getattr(known, name) < 2, name
