"""transformers' cache, read by native layers."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers import MistralConfig as HFConfig

from ligermodels.integrations.hf_cache import HFCache


def test_positions_of_a_window() -> None:
    config = HFConfig(num_hidden_layers=1, sliding_window=3, hidden_size=8, num_attention_heads=2)
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
