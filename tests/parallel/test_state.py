"""Whole tensors of which a rank holds slices. Several ranks: test_shard.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ligermodels.parallel.layout import TensorSlice, local_slices
from ligermodels.parallel.state import SlicedTensor


def test_what_a_slice_cannot_do_is_refused() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    slices = [TensorSlice(whole[:2], 0), TensorSlice(whole[2:, 1:], 2, 1)]
    tensor = SlicedTensor((6, 4), whole.dtype, slices, lambda: whole)
    assert "SlicedTensor(shape=(6, 4)" in repr(tensor)
    with pytest.raises(NotImplementedError, match="call full_tensor"):
        tensor + 1
    with pytest.raises(ValueError, match="is not on this rank"):
        tensor.__get_tensor_shard__(dcp.metadata.MetadataIndex("x", torch.Size([5, 0])))
    assert local_slices(torch.empty(0, 2)) == []
