"""How options are split into those of the loss and those of chunks.

tests/layers/test_loss_head_options.py tests the refusals of all options.
"""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.loss_options import (
    ChunkOptions,
    CrossEntropyOptions,
    LossOptions,
    TokenRequest,
    token_request,
)


def test_defaults() -> None:
    expected = (CrossEntropyOptions(), ChunkOptions(), TokenRequest(), "mean", None, None, None)
    assert LossOptions.of() == expected


def test_each_option_is_in_one_group() -> None:
    options, chunks, request, *_ = LossOptions.of(
        z_loss=0.1, softcap=3.0, chunk_size=8, skip_ignored=True, max_valid=5, top_k=2
    )
    assert options == CrossEntropyOptions(z_loss=0.1, softcap=3.0)
    assert chunks == ChunkOptions(chunk_size=8, skip_ignored=True, max_valid=5)
    assert request == TokenRequest(top_k=2)


def test_a_temperature_divides_scale_and_cap() -> None:
    options = LossOptions.of(temperature=2.0, softcap=3.0).formula
    assert options == CrossEntropyOptions(softcap=1.5, logit_scale=0.5)


def test_statistics_by_name() -> None:
    assert token_request(True, 0).stats == ("log_probs", "entropy", "correct")
    assert token_request(["mean_logits", "entropy"], 0).stats == ("entropy", "mean_logits")
    assert token_request(False, 0).is_empty and not token_request(False, 1).is_empty


def test_what_no_call_accepts_is_refused() -> None:
    for wrong in ({"normalizer": 3, "reduction": "sum"}, {"normalizer": torch.ones(1)}):
        with pytest.raises(ValueError, match="normalizer"):
            LossOptions.of(**wrong)
    with pytest.raises(ValueError, match="max_valid=3"):
        LossOptions.of(max_valid=3)
