"""Fixtures that run the op tests with the references on the CPU, in the interpreter, and on a GPU.

The same test functions run in all three places.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


class Place(NamedTuple):
    device: str
    dtype: torch.dtype


def places(*cpu: torch.dtype, gpu: tuple[torch.dtype, ...]) -> list:
    """Return the CPU and the GPU at these dtypes; the interpreter runs only float32."""
    if INTERPRETING:
        only = Place("cpu", torch.float32)
        return [pytest.param(only, id="interpreter-float32", marks=pytest.mark.interpreter)]
    return [pytest.param(Place("cpu", dtype), id=f"cpu-{str(dtype)[6:]}") for dtype in cpu] + [
        pytest.param(Place("cuda", dtype), id=f"gpu-{str(dtype)[6:]}", marks=pytest.mark.gpu)
        for dtype in gpu
    ]


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
FLOAT32, FLOAT64 = torch.float32, torch.float64
PLACES = places(FLOAT32, FLOAT64, BFLOAT16, gpu=(FLOAT32, BFLOAT16))
EVERY_PLACE = places(FLOAT32, FLOAT64, BFLOAT16, FLOAT16, gpu=(FLOAT32, BFLOAT16, FLOAT16))
FLOAT32_PLACES = places(FLOAT32, gpu=(FLOAT32,))
COMPILED_PLACES = places(FLOAT32, BFLOAT16, gpu=(BFLOAT16,))


def running(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place; in a process with TRITON_INTERPRET=1, let the ops run in Triton there."""
    if INTERPRETING:
        monkeypatch.setenv("LIGERMODELS_BACKEND", "triton")
    return request.param


place = pytest.fixture(params=PLACES, name="place")(running)
"""The device and the dtype with which a test of a single op runs."""
every_place = pytest.fixture(params=EVERY_PLACE, name="every_place")(running)
"""The device and the dtype, float16 included, with which a test of all ops runs."""
float32_place = pytest.fixture(params=FLOAT32_PLACES, name="float32_place")(running)
"""The device of a test that does not depend on the dtype, with float32."""
compiled_place = pytest.fixture(params=COMPILED_PLACES, name="compiled_place")(running)
"""The device and the dtype of a slow test, float32 or bfloat16."""
