"""Memory plans: their values, their JSON, and how a model takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ligermodels import ConfigError, LayerPlan, MemoryPlan
from ligermodels.memory.plan import Prediction
from tests.models.pairs import tiny_model


def test_a_plan_written_as_json_reads_back() -> None:
    plan = MemoryPlan.of(["all", LayerPlan("input", host=True), LayerPlan("attention", tile=64)])
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.recomputes and plan.uses_host
    two, tile = np.int64(2), np.int32(8)
    plan = MemoryPlan.uniform(two, LayerPlan(tile=tile), host_budget=two, head_chunk=tile)
    assert plan == MemoryPlan.uniform(2, LayerPlan(tile=8), host_budget=2, head_chunk=8)
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for layers in (list(plan.layers), iter(plan.layers)):
        assert MemoryPlan(layers, 2, 8) == plan  # type: ignore[arg-type]
    assert not MemoryPlan.uniform(2, "all").recomputes
    assert MemoryPlan.uniform(2, LayerPlan(tile=64)).recomputes


def test_the_printed_plan_shows_the_tiles_of_layers() -> None:
    plan = MemoryPlan.of([LayerPlan("input", tile=64), *["input", "all"] * 2])
    assert str(plan).splitlines() == [
        "   1 layer keeps input, MLP in tiles of 64 tokens: 0",
        "   2 layers keep input: 1, 3",
        "   2 layers keep all: 2, 4",
        "what each layer keeps: ▃▃█▃█",
    ]


def test_a_plan_has_a_bar_for_each_layer() -> None:
    plan = MemoryPlan.of(["all", "input", LayerPlan("attention", host=True)])
    assert plan.bars() == "█▃▒" and "what each layer keeps: █▃▒" in str(plan)
    sizes = {
        "batch": 1,
        "seq": 8,
        "seconds": 1.0,
        "budget": 2**30,
        "layer_bytes": (2**30, 0, 2**29),
    }
    others = dict.fromkeys({x.name for x in fields(Prediction)} - sizes.keys() - {"gains"}, 0)
    plan = replace(plan, prediction=Prediction(**sizes, **others))
    assert plan.bars() == "█▁▒" and MemoryPlan.from_dict(plan.to_dict()) == plan
    pytest.importorskip("matplotlib")
    (axes,) = plan.plot().axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.0, 0.5]
    assert "predicted peak 0.0 of 1.0 GiB" in axes.get_title("left")


def test_a_model_takes_a_plan_for_its_number_of_layers() -> None:
    model = tiny_model(num_hidden_layers=3)
    with pytest.raises(ConfigError, match="2 layers, but the model has 3"):
        model.set_memory_plan(MemoryPlan.uniform(2, "input"))
    for plan in ("auto", 3, {"layers": []}, ["input"] * 3, MemoryPlan):
        with pytest.raises(ConfigError, match="is no MemoryPlan; make one with model"):
            model.set_memory_plan(plan)
    plan = MemoryPlan.of(["all", LayerPlan("attention", tile=8), "no_gate_up"])
    model.set_memory_plan(plan)
    assert model.memory_plan == plan
    assert [layer.mlp.policy for layer in model.layers] == ["all", "attention", "no_gate_up"]
    assert [layer.mlp.tile for layer in model.layers] == [None, 8, None]
    model.set_memory_plan(None)
    assert model.memory_plan is None and model.layers[1].self_attn.policy == "all"
    model.set_memory_plan(MemoryPlan.uniform(3, "input"))
    model.layers = model.layers[:2]
    with pytest.raises(ConfigError, match="3 layers, but the model has 2"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def stored(**values: Any) -> MemoryPlan:
    return MemoryPlan.from_dict({"layers": [{}], **values})


def test_impossible_plans_are_refused() -> None:
    calls: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        *((LayerPlan, {"tile": x}, f"tile={x!r}; expected an integer") for x in (0, True, 1.0)),
        (LayerPlan, {"host": "x"}, "host='x'; expected True or False"),
        (
            LayerPlan,
            {"policy": "some"},
            "policy='some'; expected 'all', 'no_gate_up', 'attention' or 'input'",
        ),
        (partial(MemoryPlan, (LayerPlan(),)), {"host_budget": "4GiB"}, "host_budget='4GiB'"),
        (partial(MemoryPlan, ()), {"head_chunk": 0}, "head_chunk=0; expected an integer of 1"),
        (MemoryPlan, {"layers": ("input",)}, "layer 'input'; expected a LayerPlan"),
        (MemoryPlan.of, {"layers": "input"}, "policy='i'; expected 'all'"),
        *(
            (MemoryPlan.uniform, {"num_layers": x, "layer": "all"}, f"num_layers={x!r}; expected")
            for x in (-1, 3.0, True)
        ),
        (MemoryPlan.from_dict, {"values": {}}, "not the values of a plan"),
        (stored, {"layers": [{"policy": "some"}]}, "policy='some'"),
        (stored, {"layers": 3}, "not the values of a plan"),
        (stored, {"more": 1}, "not the values of a plan"),
    ]
    for call, given, complaint in calls:
        with pytest.raises(ConfigError, match=complaint):
            call(**given)
