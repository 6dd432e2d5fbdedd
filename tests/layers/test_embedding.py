"""Compare the scaled embedding with its definition, including the rounding."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from ligermodels.layers import ScaledEmbedding


@pytest.mark.parametrize(
    "hidden, rounded", [(2048, 45.25), (3072, 55.5)], ids=["gemma-2b", "gemma-7b"]
)
def test_the_scale_is_rounded_to_the_weights_dtype(hidden: int, rounded: float) -> None:
    embedding, ids = ScaledEmbedding(3, 2, scale=hidden**0.5), torch.tensor([[0, 2]])
    rows = embedding.weight.detach()[ids]
    torch.testing.assert_close(embedding(ids), rows * hidden**0.5)
    out = embedding.to(torch.bfloat16)(ids)
    assert torch.equal(out, rows.bfloat16() * torch.tensor(rounded, dtype=torch.bfloat16))


def test_gradient_and_padding() -> None:
    embedding = ScaledEmbedding(5, 3, padding_idx=1, scale=4.0)
    upstream = torch.randn(4, 3)
    embedding(torch.tensor([0, 1, 2, 2])).backward(upstream)
    expected = torch.zeros(5, 3)
    expected[0], expected[2] = 4.0 * upstream[0], 4.0 * (upstream[2] + upstream[3])
    torch.testing.assert_close(embedding.weight.grad, expected)
    assert "scale=4.0" in repr(embedding)


def test_tensor_parallel(tmp_path) -> None:
    """The rows of a rank may be a partial sum, which cannot be scaled in place."""
    store = f"file://{tmp_path / 'store'}"
    embedding, ids = ScaledEmbedding(8, 4, scale=2.0), torch.tensor([[1, 2, 7]])
    expected = embedding(ids)
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        split = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(embedding, init_device_mesh("cpu", (1,)), split)
        torch.testing.assert_close(embedding(ids), expected)
    finally:
        dist.destroy_process_group()
