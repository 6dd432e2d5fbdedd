"""transformers' arguments and cache, in terms of native models."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, MistralConfig

from ligermodels.integrations.hf_base import HFCache, native_inputs
from tests.tiny_models import random_model


def test_flattened_rows_become_documents() -> None:
    ids, positions = torch.arange(5).view(1, 5), torch.tensor([[0, 1, 0, 1, 2]])
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    others = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": 3,
        "max_length_k": 3,
        "cache_position": positions,
    }
    given = native_inputs(ids, None, None, positions, None, others | {"token_type_ids": None})
    model = random_model("llama")
    assert given["position_ids"] is None and given["max_seqlen"] == 3
    torch.testing.assert_close(model(**given), model(ids, position_ids=positions))


@pytest.mark.gpu
def test_a_mask_of_ones_on_a_gpu_is_left_out() -> None:
    ones = torch.ones(2, 4, dtype=torch.int64, device="cuda")
    padded = ones.clone()
    padded[1, 3:] = 0
    for mask, expected in ((ones, None), (padded, padded.bool())):
        found = native_inputs(ones, None, mask, None, None, {})["attention_mask"]
        assert found is expected if expected is None else torch.equal(found, expected)


def test_positions_of_a_window() -> None:
    config = MistralConfig(
        num_hidden_layers=1, sliding_window=3, hidden_size=8, num_attention_heads=2
    )
    theirs = DynamicCache(config=config)
    cache = HFCache(theirs)
    k = torch.arange(5.0).view(1, 1, 5, 1)
    keys, _ = cache.update(0, k, k)
    assert cache.length == 0 and cache.key_positions(0, 5) is None
    cache.advance(5)
    cache = HFCache(theirs)
    assert cache.length == 5
    keys, _ = cache.update(0, k[:, :, :1] + 5, k[:, :, :1])
    positions = cache.key_positions(0, 1)
    with pytest.raises(ValueError, match=r"layer 0 was updated twice in one pass.*use_cache=False"):
        cache.update(0, k[:, :, :1], k[:, :, :1])
    assert positions is not None and positions.tolist() == keys.flatten().tolist() == [3, 4, 5]
