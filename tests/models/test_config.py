"""Config fields: what is derived, what is refused, and by which message."""

from typing import Any

import pytest

from ligermodels import ConfigError, LigerLlama, LlamaConfig


def test_derived_fields() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert LlamaConfig(hidden_size=60, num_attention_heads=7, head_dim=16).head_dim == 16


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"hidden_size": 2**62}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"hidden_size": 63}, "head_dim"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"pad_token_id": 32000}, "pad_token_id"),
        ({"rope_scaling": {"rope_type": "warp"}}, "warp"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
    ],
)
def test_impossible_fields_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LlamaConfig(**{"hidden_size": 64, "num_attention_heads": 4, **fields})


def test_a_field_assigned_later_is_checked_when_a_model_is_built() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    config.num_key_value_heads = 3
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        LigerLlama(config)


def test_preset_with_overrides() -> None:
    config = LlamaConfig.preset("llama-3.2-1b", num_hidden_layers=2)
    assert config.num_hidden_layers == 2
    assert config.tie_word_embeddings and config.rope_scaling["factor"] == 32.0


def test_to_dict_names_the_family_and_leaves_out_extra() -> None:
    values = LlamaConfig(extra={"unknown": 1}).to_dict()
    assert values["model_type"] == "llama" and values["hidden_size"] == 4096
    assert "extra" not in values
