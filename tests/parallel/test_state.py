"""Whole tensors of which a rank holds parts. Several ranks: test_shard.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ligermodels.parallel.layout import TensorSlice
from ligermodels.parallel.state import SlicedTensor

WHOLE = torch.arange(24.0).reshape(6, 4)


def in_parts(values: torch.Tensor) -> SlicedTensor:
    parts = [
        TensorSlice(values[:2], 0),
        TensorSlice(values[2:, :1], 2, 0),
        TensorSlice(values[2:, 1:], 2, 1),
    ]
    return SlicedTensor((6, 4), values.dtype, parts, lambda: values)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_hold_the_whole_tensor(tmp_path: Path) -> None:
    dcp.save({"x": in_parts(WHOLE.clone())}, checkpoint_id=tmp_path / "a", no_dist=True)
    for read in (torch.zeros(6, 4), torch.zeros(6, 4)):
        dcp.load({"x": in_parts(read)}, checkpoint_id=tmp_path / "a", no_dist=True)
        assert read.equal(WHOLE)
    plain = {"x": torch.zeros(6, 4)}
    dcp.load(plain, checkpoint_id=tmp_path / "a", no_dist=True)
    assert plain["x"].equal(WHOLE)


def test_other_operations_are_refused() -> None:
    parts = in_parts(WHOLE)
    assert "SlicedTensor(shape=(6, 4)" in repr(parts)
    assert parts.full_tensor().equal(WHOLE)
    with pytest.raises(NotImplementedError, match="call full_tensor"):
        parts + 1
    with pytest.raises(ValueError, match="is not on this rank"):
        parts.__get_tensor_shard__(dcp.metadata.MetadataIndex("x", torch.Size([5, 0])))


def test_the_places_of_parts() -> None:
    parts = in_parts(WHOLE).slices
    assert [part.offsets for part in parts] == [(0, 0), (2, 0), (2, 1)]
    assert all(part.place_in(WHOLE).equal(part.values) for part in parts)
    assert TensorSlice(torch.ones(2), 3).offsets == (3,)
