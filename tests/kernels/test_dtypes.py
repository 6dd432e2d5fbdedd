from __future__ import annotations

import torch

from ligermodels.kernels.dtypes import cast, compute_dtype


def test_compute_dtype() -> None:
    assert compute_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert compute_dtype(torch.ones(1, dtype=dtype)) == torch.float32


def test_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    assert cast(x, torch.float32) is x
    wide = cast(x, torch.float64)
    assert wide.dtype == torch.float64
    assert torch.equal(torch.autograd.grad(wide.sum(), x)[0], torch.ones(2))
