"""The weight map in transformers' terms: which names of a checkpoint meet in which parameter."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from transformers.core_model_loading import rename_source_key

from ligermodels.converters.weight_map import Entry, Span, WeightMap, packed_entry
from ligermodels.integrations.hf_weights import Repack, conversions, pack_hf_names
from ligermodels.models.llama import LlamaConfig, weight_map


def test_layers_share_a_conversion() -> None:
    found = conversions(weight_map(LlamaConfig.small(num_hidden_layers=12, attention_bias=True)))
    assert len(found) == 3  # weight and bias of q, k, v, and the weight of gate, up
    name = "model.layers.11.self_attn.k_proj.bias"
    made, _ = rename_source_key(name, [], found)
    assert made == "model.layers.11.self_attn.qkv_proj.bias"
    back = [conversion.reverse_transform() for conversion in found]
    assert rename_source_key(made, [], back)[0] == "model.layers.11.self_attn.q_proj.bias"
    other = "model.layers.1.other_self_attn.k_proj.bias"
    assert rename_source_key(other, [], found)[0] == other


def test_rows_of_one_tensor_in_two_parameters() -> None:
    """A family from outside may split a tensor of its checkpoint."""
    own = WeightMap(
        tuple(
            Entry(f"layers.0.{name}", (2, 3), (Span("model.layers.0.both", row, 0, 2),))
            for name, row in (("first", 2), ("second", 0))
        )
    )
    (conversion,) = conversions(own)
    model = SimpleNamespace(weight_map=own)
    both = torch.arange(12.0).view(4, 3)
    options = {
        "source_patterns": conversion.source_patterns,
        "target_patterns": conversion.target_patterns,
        "full_layer_name": "model.layers.0.first",
        "model": model,
    }
    made = Repack(to_hf=False).convert({r"\.both": [both]}, **options)
    assert torch.equal(made[".first"], both[2:]) and torch.equal(made[".second"], both[:2])


def test_a_state_dict_with_hf_names_is_packed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.qk = nn.Linear(2, 5, bias=False)
            self.weight_map = WeightMap((packed_entry("qk.weight", (2,), ("q", 3), ("k", 2)),))

    model = Model()
    q, k = torch.ones(3, 2), torch.zeros(2, 2)
    state = {"inner.q": q, "inner.k": k, "inner.other": q}
    pack_hf_names(model, state, "inner.")
    assert state.keys() == {"inner.model.qk.weight", "inner.other"}
    assert torch.equal(state["inner.model.qk.weight"], torch.cat([q, k]))
