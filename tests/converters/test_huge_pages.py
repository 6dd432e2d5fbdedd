"""Allocate the parameters of a load."""

import copy
import pickle

import pytest
import torch

from ligermodels.converters.safetensors_file import empty_in_huge_pages


def test_tensors_are_as_torch_makes_them():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in [(), (0, 3), (3,), (400, 301), (7, 100, 100)]:
            x = empty_in_huge_pages(shape, dtype, "cpu")
            assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
            assert x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes
            assert torch.equal(copy.deepcopy(x.fill_(3.0)), torch.full(shape, 3.0, dtype=dtype))
            assert torch.equal(pickle.loads(pickle.dumps(x)), x)
    assert empty_in_huge_pages((400, 301), torch.float32, "meta").is_meta


@pytest.mark.parametrize("count", [1 << 50, 1 << 62])
def test_too_many_bytes_are_refused_as_torch_refuses_them(count):
    """The command line knows an error of memory by torch's words."""
    with pytest.raises(RuntimeError, match=r"can't allocate memory|Storage size calculation"):
        empty_in_huge_pages((count,), torch.float32, "cpu")
