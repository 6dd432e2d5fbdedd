"""How options are split into those of the loss and those of chunks.

tests/layers/test_loss_head_options.py tests the refusals of all options.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.loss_options import ChunkOptions, CrossEntropyOptions, split_options


def test_defaults() -> None:
    assert split_options({}) == (CrossEntropyOptions(), ChunkOptions())


def test_each_option_is_in_one_group() -> None:
    options, chunks = split_options(
        {"z_loss": 0.1, "softcap": 3.0, "chunk_size": 8, "skip_ignored": True, "max_valid": 5}
    )
    assert options == CrossEntropyOptions(z_loss=0.1, softcap=3.0)
    assert chunks == ChunkOptions(chunk_size=8, skip_ignored=True, max_valid=5)


def test_what_no_call_accepts_is_refused() -> None:
    for wrong in ({"normalizer": 3, "reduction": "sum"}, {"normalizer": torch.ones(1)}):
        with pytest.raises(ValueError, match="normalizer"):
            split_options(wrong)
    with pytest.raises(ValueError, match="max_valid=3"):
        split_options({"max_valid": 3})
