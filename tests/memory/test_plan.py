"""Memory plans: their values, their JSON, and how a model takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ligermodels import ConfigError, LayerPlan, MemoryPlan
from tests.models.pairs import tiny_model


def test_a_plan_written_as_json_reads_back() -> None:
    plan = MemoryPlan.of(["all", LayerPlan("input", host=True), "attention"], mlp_tile=64)
    assert MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.recomputes and plan.uses_host
    assert not MemoryPlan.uniform(2, "all").recomputes


@pytest.mark.parametrize(
    "values", [{}, {"layers": [{"keep": "some"}]}, {"layers": [{}], "more": 1}, {"layers": 3}]
)
def test_other_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="memory plan"):
        MemoryPlan.from_dict(values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"layers": (LayerPlan(),), "mlp_tile": 0}, "mlp_tile=0; expected an integer of 1"),
        ({"layers": (LayerPlan(),), "mlp_tile": "abc"}, "mlp_tile='abc'"),
        ({"layers": (LayerPlan(),), "host_budget": "4GiB"}, "host_budget='4GiB'"),
        ({"layers": ("input",)}, "layer 'input'; expected a LayerPlan"),
    ],
)
def test_impossible_plans_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        MemoryPlan(**values)


def test_what_is_no_plan_is_refused() -> None:
    model = tiny_model()
    for plan in ("input", {"layers": []}, ["input"] * 3):
        with pytest.raises(ConfigError, match="is no MemoryPlan"):
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
    plan = MemoryPlan.of(["all", "attention", "no_gate_up"])
    model.set_memory_plan(plan)
    assert model.memory_plan == plan
    assert [layer.mlp.keep for layer in model.layers] == ["all", "attention", "no_gate_up"]
    model.set_memory_plan(None)
    assert model.memory_plan is None and model.layers[1].self_attn.keep == "all"
