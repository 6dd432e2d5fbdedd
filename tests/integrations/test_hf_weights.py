"""The weight map in transformers' terms: which names of a checkpoint meet in which parameter."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ligermodels.converters.weight_map import Entry, Span, WeightMap
from ligermodels.integrations.hf_weights import Repack, conversions


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
