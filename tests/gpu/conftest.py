"""The precision of products in all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Compute products of float32 without TF32, and free what a test leaves in the cache."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.empty_cache()
