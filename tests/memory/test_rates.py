"""The rates that turn a step's work into seconds."""

from __future__ import annotations

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.memory import rates
from ligermodels.memory.rates import AttentionKind, data_sheet, gpu_bytes, rates_of


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
    assert found.products / 2 < found.mixed_products < 2 * found.products
    assert callable(found.attention) and isinstance(known.attention, float)
    for kind in (
        AttentionKind("sdpa", 32, 8, 128, 4096),
        AttentionKind("varlen", 32, 8, 128, 2048, 512),
        AttentionKind("flex", 16, 8, 256, 4096, None, 50.0),
    ):
        forward, backward = (found.attention(kind, way) for way in ("forward", "backward"))
        assert 0.05 < backward / known.attention < 2 and 0.05 < forward / known.attention < 2
