"""Tensors under HF's names, out of parameters and back into them."""

from __future__ import annotations

import torch

from ligermodels.converters.weight_map import Entry, Span, WeightMap, hf_tensors, native_tensor


def test_tensors_go_out_and_come_back() -> None:
    packed = Entry("qk", (5, 2), (Span("q", 0, 0, 3), Span("k", 0, 3, 2)))
    halves = [Entry(name, (2, 2), (Span("u", row, 0, 2),)) for name, row in (("b", 2), ("a", 0))]
    weight_map = WeightMap((packed, *halves))
    weights = {
        entry.name: torch.arange(entry.shape[0] * 2.0).view(entry.shape) + i
        for i, entry in enumerate(weight_map)
    }
    tensors = dict(hf_tensors(weight_map, weights))
    assert weight_map.source_shapes() == {"q": (3, 2), "k": (2, 2), "u": (4, 2)}
    assert list(tensors) == ["q", "k", "u"]
    assert torch.equal(tensors["k"], weights["qk"][3:])
    assert tensors["q"].data_ptr() == weights["qk"].data_ptr()
    assert torch.equal(tensors["u"], torch.cat([weights["a"], weights["b"]]))
    for entry in weight_map:
        assert torch.equal(native_tensor(entry, tensors), weights[entry.name])
