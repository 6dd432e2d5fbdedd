"""The values of 4-bit codes, by both implementations."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.dequantize import NF4, dequantize


@pytest.mark.parametrize(
    "rows, columns, block", [(3, 128, 64), (2, 24, 8), (1, 2, 2), (2, 4160, 64), (0, 128, 64)]
)
def test_values(place, rows, columns, block) -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=draw)
    scales = torch.rand(rows, columns // block, generator=draw).bfloat16()
    nibbles = torch.cat([codes % 16, codes // 16], 1).long()
    levels = torch.tensor(NF4)
    expected = levels[nibbles] * scales.float().repeat_interleave(block, 1)
    found = dequantize(*(x.to(place.device) for x in (codes, scales, levels)), place.dtype)
    assert torch.equal(found.cpu(), expected.to(place.dtype))
