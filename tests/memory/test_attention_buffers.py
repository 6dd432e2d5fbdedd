from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from ligermodels.memory.attention_buffers import scratch, sdpa_backend

aten = torch.ops.aten


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_scratch_of_flash_attention() -> None:
    q, k = meta(2, 8, 200, 80), meta(2, 2, 200, 80)
    sums = 2 * 8 * 256 * (96 + 1) * 4
    assert scratch(aten.mm.default, (meta(2, 2), meta(2, 2))) == 0
    flash = aten._scaled_dot_product_flash_attention_backward.default
    assert scratch(flash, (q, q, q, q)) == sums
    assert scratch(flash, (q, q, k, k)) == sums + 2 * 2 * 200 * 8 * 80 * 2


def test_scratch_of_an_embedding() -> None:
    backward = aten.embedding_dense_backward.default
    few, many = meta(1, 3072, dtype=torch.int64), meta(2, 3072, dtype=torch.int64)
    assert scratch(backward, (meta(1, 3072, 16), few, 100, -1, False)) == 0
    assert scratch(backward, (meta(2, 3072, 16), many, 100, -1, False)) == 6144 * (16 * 4 + 72)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there PyTorch is asked")
def test_kernels_without_a_gpu() -> None:
    assert sdpa_backend(32, 8, 128, torch.bfloat16) == SDPBackend.CUDNN_ATTENTION
    assert sdpa_backend(16, 16, 256, torch.bfloat16) == SDPBackend.FLASH_ATTENTION
    assert sdpa_backend(16, 16, 64, torch.float32) == SDPBackend.EFFICIENT_ATTENTION
    assert sdpa_backend(16, 8, 64, torch.float32) == SDPBackend.MATH
