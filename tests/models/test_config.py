"""Config fields: which values are refused, which are derived, and what follows from them."""

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest

from ligermodels import (
    ConfigError,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    LigerLlama,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from ligermodels.models.auto import families
from ligermodels.models.config import ModelConfig

# Values that no field of a type can have, by the start of its annotation.
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "int": ("a", 2.0, True, [None], {}),
    "float": ("x", math.nan, math.inf, -1.0, True, [1.0], 10**400),
    "bool": ("no", 1, [True]),
    "str": (5, ["a"]),
    "dict": (5, "x", [1]),
    "list": (5, "x", ("full_attention",), [None], ["full_attention"]),
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("family", families())
def test_an_impossible_value_of_any_field_is_refused_by_name(family: str) -> None:
    cls = families()[family].config_class
    small = {name: value for name, value in vars(cls.small()).items() if not name.startswith("_")}
    if "use_sliding_window" in small:
        small |= {"use_sliding_window": True, "sliding_window": 4}
    if "max_window_layers" in small:
        small |= {"max_window_layers": 0}
    for field in dataclasses.fields(cls):
        annotation = inspect.formatannotation(field.type)
        values = [*IMPOSSIBLE[re.findall(r"\w+", annotation)[0]]]
        if field.name in (*cls.largest, "sliding_window"):
            values += [0, -1, 2**62]
        if field.name in cls.positive:
            values += [0.0]
        for value in values:
            with pytest.raises(ConfigError, match=field.name):
                cls(**{**small, field.name: value})


def test_fields_that_contradict_each_other_are_refused() -> None:
    cases: list[tuple[type[ModelConfig], dict[str, Any], str]] = [
        (LlamaConfig, {"num_key_value_heads": 3}, "is not a multiple of num_key"),
        (
            LlamaConfig,
            {"hidden_size": 63},
            "hidden_size 63 .* 4; set head_dim",
        ),
        (LlamaConfig, {"head_dim": 15}, "1.0 of head_dim 15 is 15, .* even"),
        (LlamaConfig, {"hidden_act": "relu"}, "hidden_act 'relu' is not implemented; expected"),
        (LlamaConfig, {"attention_dropout": 0.1}, "attention_dropout 0.1 is not implemented"),
        (LlamaConfig, {"pad_token_id": 32000}, "pad_token_id 32000 is outside the vocabulary"),
        (LlamaConfig, {"rope_scaling": {"rope_type": "warp"}}, "warp"),
        (LlamaConfig, {"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        (LlamaConfig, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        (MixtralConfig, {"num_experts_per_tok": 9}, "is 9; expected at most num_local_experts = 8"),
        (Qwen3MoeConfig, {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef is -0.1; expected"),
        (Gemma2Config, {"sliding_window": None}, "sliding_window is None, but layer 0"),
        (Gemma2Config, {"layer_types": MIXED}, "has 3 entries, expected .* 26"),
        (Gemma2Config, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
        (Gemma3Config, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            Qwen2Config,
            {"layer_types": MIXED, "num_hidden_layers": 3},
            "sliding_window is None",
        ),
    ]
    for cls, fields, named in cases:
        with pytest.raises(ConfigError, match=named):
            cls(**{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, **fields})


def test_the_window_of_each_layer() -> None:
    cases: list[tuple[type[ModelConfig], dict[str, Any], list[int | None]]] = [
        (LlamaConfig, {}, [None, None, None]),
        (MistralConfig, {}, [4096, 4096, 4096]),
        (MistralConfig, {"sliding_window": None}, [None, None, None]),
        (Gemma2Config, {"sliding_window": 7}, [7, None, 7]),
        (Gemma3Config, {"sliding_window_pattern": 3}, [4096, 4096, None]),
        (Gemma3Config, {"sliding_window_pattern": 1, "sliding_window": None}, [None, None, None]),
        (Qwen2Config, {"max_window_layers": 0}, [None, None, None]),
        (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096]),
        (Qwen3Config, {"use_sliding_window": True, "max_window_layers": -1}, [4096, 4096, 4096]),
        (Gemma2Config, {"layer_types": MIXED}, [None, 4096, None]),
        (Gemma3Config, {"layer_types": MIXED}, [None, 4096, None]),
        (Qwen3Config, {"layer_types": MIXED, "use_sliding_window": True}, [None, 4096, None]),
    ]
    for cls, fields, windows in cases:
        config = cls(num_hidden_layers=3, **fields)
        assert config.sliding_windows == windows, (cls, fields)
        # The config does not fill in layer_types.
        assert getattr(config, "layer_types", None) == fields.get("layer_types"), (cls, fields)


def test_the_activation() -> None:
    for config, activation in (
        (LlamaConfig(hidden_act="swish"), "silu"),
        (LlamaConfig(hidden_act="gelu"), "gelu"),
        (LlamaConfig(hidden_act="gelu_new"), "gelu_tanh"),
        (GemmaConfig(hidden_act="gelu"), "gelu_tanh"),
        (GemmaConfig(hidden_act="silu"), "silu"),
        (Gemma2Config(hidden_activation="gelu"), "gelu"),
    ):
        assert config.activation == activation, config


def test_presets_take_overrides_and_are_not_shared() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-9b.*llama-3-8b"):
        LlamaConfig.preset("llama-3-9b")
    config = LlamaConfig.preset("llama-3.2-1b", num_hidden_layers=2)
    assert config.num_hidden_layers == 2 and config.tie_word_embeddings
    config.rope_scaling["factor"] = 1.0
    assert LlamaConfig.preset("llama-3.2-1b").rope_scaling["factor"] == 32.0
    values = LlamaConfig(extra={"unknown": 1}).to_dict()
    assert values["model_type"] == "llama" and values["hidden_size"] == 4096
    assert "extra" not in values


def test_fields_that_are_not_given_follow_from_others() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    with pytest.raises(ConfigError, match=r"hidden_size 64 is not a multiple of .* 6; set"):
        LlamaConfig(hidden_size=64, num_attention_heads=6)
    config.num_attention_heads = 6  # A field assigned later is checked when a model is built.
    with pytest.raises(ConfigError, match="num_attention_heads 6 is not a multiple of"):
        LigerLlama(config)
