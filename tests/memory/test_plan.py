"""Memory plans: their values, their JSON, and how a model takes them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from ligermodels import ConfigError, LayerPlan, MemoryPlan
from ligermodels.memory.plan import Prediction
from tests.models.pairs import tiny_model


def test_a_plan_written_as_json_reads_back() -> None:
    plan = MemoryPlan.of(["all", LayerPlan("input", host=True), "attention"], mlp_tile=64)
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.recomputes and plan.uses_host
    assert not MemoryPlan.uniform(2, "all").recomputes
    assert MemoryPlan.uniform(2, "all", mlp_tile=64).recomputes


def test_a_plan_that_was_written_with_one_tile_for_all_layers_means_the_same() -> None:
    for tile in (64, None):
        layers = [{"policy": "all", "host": False}, {"policy": "input", "host": True}]
        older = {"layers": layers, "mlp_tile": tile, "host_budget": 2**30, "prediction": None}
        plan = MemoryPlan.from_dict(older)
        assert plan.layers == (LayerPlan("all", False, tile), LayerPlan("input", True, tile))
        assert "mlp_tile" in older and MemoryPlan.from_dict(plan.to_dict()) == plan


def test_the_printed_plan_shows_the_tiles_of_layers() -> None:
    plan = MemoryPlan.of([LayerPlan("input", tile=64), *["input", "all"] * 2])
    assert str(plan).splitlines() == [
        "   1 layer keeps input, MLP in tiles of 64 tokens: 0",
        "   2 layers keep input: 1, 3",
        "   2 layers keep all: 2, 4",
    ]


def test_one_tile_is_for_the_layers_without_their_own() -> None:
    plan = MemoryPlan.of(["all", LayerPlan("input", tile=8)], mlp_tile=64)
    assert [layer.tile for layer in plan.layers] == [64, 8]


@pytest.mark.parametrize(
    "values", [{}, {"layers": [{"policy": "some"}]}, {"layers": [{}], "more": 1}, {"layers": 3}]
)
def test_other_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="memory plan"):
        MemoryPlan.from_dict(values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"layers": (LayerPlan(),), "host_budget": "4GiB"}, "host_budget='4GiB'"),
        ({"layers": ("input",)}, "layer 'input'; expected a LayerPlan"),
        ({"layers": 3}, "layers=3; expected one value for each layer"),
        ({"layers": "input"}, "layers='input'; expected one value for each layer"),
        ({"layers": (), "head_chunk": 0}, "head_chunk=0; expected an integer of 1"),
        ({"layers": (), "prediction": {}}, "prediction={}; expected a Prediction or None"),
    ],
)
def test_impossible_plans_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        MemoryPlan(**values)


@pytest.mark.parametrize("tile", [0, -1, True, 1.0, "abc"])
def test_impossible_tiles_are_refused(tile: Any) -> None:
    with pytest.raises(ConfigError, match=f"tile={tile!r}; expected an integer of 1 or more"):
        LayerPlan("input", tile=tile)
    with pytest.raises(ConfigError, match="tile="):
        MemoryPlan.uniform(2, "all", mlp_tile=tile)


def test_levels_are_given_for_each_layer() -> None:
    for policies in (3, None, "input"):
        with pytest.raises(ConfigError, match=r"expected one value for each layer.*MemoryPlan.uni"):
            MemoryPlan.of(policies)  # type: ignore[arg-type]
    for count in (-1, 3.0, "3", True):
        with pytest.raises(ConfigError, match=f"num_layers={count!r}; expected an integer of 0"):
            MemoryPlan.uniform(count, "all")  # type: ignore[arg-type]


def test_numpy_integers_are_integers() -> None:
    two, tile = np.int64(2), np.int32(8)
    plan = MemoryPlan.uniform(two, "input", mlp_tile=tile, host_budget=two, head_chunk=tile)
    assert plan == MemoryPlan.uniform(2, "input", mlp_tile=8, host_budget=2, head_chunk=8)
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_layers_may_be_any_sequence() -> None:
    plan = MemoryPlan((LayerPlan(), LayerPlan("input")))
    for layers in (list(plan.layers), iter(plan.layers)):
        same = MemoryPlan(layers)  # type: ignore[arg-type]
        assert same == plan and hash(same) == hash(plan)


def test_a_stored_prediction_has_numbers() -> None:
    names = [field.name for field in dataclasses.fields(Prediction)][:-1]
    good = {"layers": [{}], "prediction": dict.fromkeys(names, 1) | {"gains": [[1, 0.5]]}}
    assert "1 GiB more" not in str(MemoryPlan.from_dict(good))
    for name, wrong in (("seconds", "x"), ("peak_bytes", None), ("gains", [[1, "x"]])):
        values = good | {"prediction": good["prediction"] | {name: wrong}}
        with pytest.raises(ConfigError, match=f"{name}=.*expected a number"):
            MemoryPlan.from_dict(values)


def test_what_is_no_plan_is_refused() -> None:
    model = tiny_model()
    for plan in ("auto", "input", 3, True, {"layers": []}, ["input"] * 3, MemoryPlan):
        with pytest.raises(ConfigError, match="is no MemoryPlan; make one with model"):
            model.set_memory_plan(plan)
    with pytest.raises(ConfigError, match="host='x'; expected True or False"):
        LayerPlan("all", host="x")  # type: ignore[arg-type]


def test_a_plan_for_other_layers_is_refused_in_forward() -> None:
    model = tiny_model(num_hidden_layers=3)
    model.set_memory_plan(MemoryPlan.uniform(3, "input"))
    model.layers = model.layers[:2]
    with pytest.raises(ConfigError, match="3 layers, but the model has 2"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def test_a_model_takes_a_plan_for_its_number_of_layers() -> None:
    model = tiny_model(num_hidden_layers=3)
    with pytest.raises(ConfigError, match="2 layers, but the model has 3"):
        model.set_memory_plan(MemoryPlan.uniform(2, "input"))
    plan = MemoryPlan.of(["all", LayerPlan("attention", tile=8), "no_gate_up"])
    model.set_memory_plan(plan)
    assert model.memory_plan == plan
    assert [layer.mlp.policy for layer in model.layers] == ["all", "attention", "no_gate_up"]
    assert [layer.mlp.tile for layer in model.layers] == [None, 8, None]
    model.set_memory_plan(None)
    assert model.memory_plan is None and model.layers[1].self_attn.policy == "all"
