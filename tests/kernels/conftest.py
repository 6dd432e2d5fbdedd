"""Where the op tests run: the CPU's reference, the Triton interpreter, a GPU. One body for all."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


class Place(NamedTuple):
    device: str
    dtype: torch.dtype


if INTERPRETING:
    PLACES = [
        pytest.param(
            Place("cpu", torch.float32), id="interpreter-float32", marks=pytest.mark.interpreter
        )
    ]
else:
    PLACES = [
        pytest.param(Place("cpu", dtype), id=f"cpu-{str(dtype)[6:]}")
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ] + [
        pytest.param(Place("cuda", dtype), id=f"gpu-{str(dtype)[6:]}", marks=pytest.mark.gpu)
        for dtype in (torch.float32, torch.bfloat16)
    ]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A device and a dtype; in a process with TRITON_INTERPRET=1, Triton on CPU tensors."""
    if INTERPRETING:
        monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    return request.param
