"""Memory plans: their values, their JSON, and how a model takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
