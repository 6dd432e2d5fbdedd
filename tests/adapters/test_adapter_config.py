"""The names in an adapter_config.json match modules as they do in PEFT."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from ligermodels.adapters.adapter_config import rank_of, targets

NAMES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "mlp.down_proj", "embed_tokens"]},
    {"target_modules": ["proj", "model.layers.1.mlp.up_proj", "layers.0.self_attn.k_proj"]},
    {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.mlp\..*"},
    {"target_modules": r".*\.(q|up)_proj"},
    {"target_modules": r"(.*\.)?layers\.(0|1)\.self_attn\.(q|v)_proj"},
    {  # Unsloth writes such a pattern
        "target_modules": r"(?:.*?(?:language|text).*?(?:attn|mlp).*?(?:q_proj|up_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
    },
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 11]},
    {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp", "lm_head"]},
    {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("config", NAMES, ids=lambda config: str(config)[:70])
def test_names_match_as_in_peft(config: dict[str, Any]) -> None:
    parts = ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"]
    names = [f"model.layers.{layer}.{part}" for layer in (0, 1, 11) for part in parts]
    names += ["model.embed_tokens", "lm_head"]
    expected = {n for n in names if bool(check_target_module_exists(LoraConfig(**config), n))}
    assert targets(config, dict.fromkeys(names, True)) == expected


@pytest.mark.parametrize(
    "key", ["proj", "q_proj", r"layers\.1\..*", r"mlp\.(up|down)_proj", "layers"]
)
def test_ranks_match_as_in_peft(key: str) -> None:
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head"):
        expected = 5 if get_pattern_key([key], name) == key else 3
        assert rank_of({"r": 3, "rank_pattern": {key: 5}}, name) == expected
