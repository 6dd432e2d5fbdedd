"""Config fields: which are derived, which are refused, and by which message."""

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ligermodels import (
    CheckpointError,
    ConfigError,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    LigerLlama,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from ligermodels.converters import hub
from ligermodels.models.config import ModelConfig

MIXED = ["full_attention", "sliding_attention", "full_attention"]


def test_derived_fields() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert LlamaConfig(hidden_size=60, num_attention_heads=7, head_dim=16).head_dim == 16


def assert_refused(config_class: type[ModelConfig], fields: dict[str, Any], match: str) -> None:
    try:
        config_class(**fields)
    except ConfigError as error:
        assert re.search(match, str(error)), (fields, match, str(error))
    else:
        pytest.fail(f"{config_class.__name__} accepts {fields}")


def test_impossible_fields_are_refused_by_name() -> None:
    for fields, named in (
        ({"hidden_size": 2**62}, "hidden_size"),
        ({"hidden_size": "a"}, "hidden_size is 'a'; expected an integer"),
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
    ):
        assert_refused(LlamaConfig, {"hidden_size": 64, "num_attention_heads": 4, **fields}, named)


def test_the_window_of_each_layer() -> None:
    cases: list[tuple[type[ModelConfig], dict[str, Any], list[int | None]]] = [
        (LlamaConfig, {}, [None, None, None]),
        (GemmaConfig, {}, [None, None, None]),
        (MistralConfig, {}, [4096, 4096, 4096]),
        (MistralConfig, {"sliding_window": None}, [None, None, None]),
        (Gemma2Config, {"sliding_window": 7}, [7, None, 7]),
        (Gemma3Config, {"sliding_window_pattern": 3}, [4096, 4096, None]),
        (Gemma3Config, {"sliding_window_pattern": 1, "sliding_window": None}, [None, None, None]),
        (Qwen2Config, {"max_window_layers": 0}, [None, None, None]),
        (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096]),
        (Qwen3Config, {"use_sliding_window": True, "max_window_layers": -1}, [4096, 4096, 4096]),
        *(
            (cls, {"layer_types": MIXED} | use, [None, 4096, None])
            for cls, use in (
                (Gemma2Config, {}),
                (Gemma3Config, {"sliding_window_pattern": 1}),
                (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 0}),
                (Qwen3Config, {"use_sliding_window": True}),
            )
        ),
    ]
    for cls, fields, windows in cases:
        config = cls(num_hidden_layers=3, **fields)
        assert config.sliding_windows == windows, (cls, fields)
        # The config does not fill in layer_types.
        assert getattr(config, "layer_types", None) == fields.get("layer_types"), (cls, fields)


def test_the_activation() -> None:
    for config, activation in (
        (LlamaConfig(), "silu"),
        (LlamaConfig(hidden_act="swish"), "silu"),
        (LlamaConfig(hidden_act="gelu"), "gelu"),
        (LlamaConfig(hidden_act="gelu_new"), "gelu_tanh"),
        (GemmaConfig(), "gelu_tanh"),
        (GemmaConfig(hidden_act="gelu"), "gelu_tanh"),
        (GemmaConfig(hidden_act="silu"), "silu"),
        (Gemma2Config(), "gelu_tanh"),
        (Gemma2Config(hidden_activation="gelu"), "gelu"),
        (Gemma3Config(hidden_activation="gelu"), "gelu"),
    ):
        assert config.activation == activation, config


def test_a_family_computes_activations_of_its_own() -> None:
    @dataclass(kw_only=True)
    class Own(ModelConfig):
        model_type: ClassVar[str] = "own"
        activations: ClassVar[dict[str, str]] = {"relu2": "squared"}

        hidden_act: str = "relu2"

    assert Own().activation == "squared"
    with pytest.raises(ConfigError, match=r"hidden_act 'silu' .*; expected one of relu2"):
        Own(hidden_act="silu")


def test_a_config_without_a_model_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="ModelConfig has no model_type; set this class attr"):
        ModelConfig()


def test_impossible_layers_are_refused_by_name() -> None:
    for cls, fields, named in (
        (MistralConfig, {"sliding_window": 0}, "sliding_window is 0"),
        (MistralConfig, {"sliding_window": 4.0}, "sliding_window' is 4.0"),
        (MistralConfig, {"sliding_window": 2**41}, "sliding_window is 2199023255552"),
        (MistralConfig, {"sliding_window": [4]}, r"sliding_window' is \[4\]"),
        (Gemma2Config, {"sliding_window": None}, "sliding_window is None, but layer 0"),
        (Gemma2Config, {"layer_types": ["full_attention"] * 2}, "has 2 entries, expected .* 26"),
        (Gemma2Config, {"layer_types": ("full_attention",) * 26}, "layer_types' is"),
        (Gemma2Config, {"layer_types": [None] * 26}, "layer_types' is"),
        (Gemma2Config, {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        (Gemma2Config, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
        (Gemma2Config, {"hidden_activation": None}, "hidden_activation' is None"),
        (Gemma3Config, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (Gemma3Config, {"rope_local_base_freq": 0}, "rope_local_base_freq is 0"),
        (Qwen2Config, {"max_window_layers": None}, "max_window_layers' is None"),
        (Qwen2Config, {"layer_types": ["sliding_attention"] * 32}, "sliding_window is None, but"),
    ):
        assert_refused(cls, fields, named)


def test_a_type_that_a_field_cannot_have_is_refused() -> None:
    for fields in (
        {"initializer_range": "x"},
        {"pad_token_id": "a"},
        {"hidden_act": [1]},
        {"rope_scaling": 5},
        {"rms_norm_eps": True},
        {"eos_token_id": "z"},
        {"tie_word_embeddings": "no"},
        {"dtype": 5},
        {"extra": None},
    ):
        assert_refused(LlamaConfig, fields, f"'{next(iter(fields))}' is .*, expected")


def test_a_field_assigned_later_is_checked_when_a_model_is_built() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    config.num_key_value_heads = 3
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        LigerLlama(config)


def test_unknown_preset_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"llama-3-9b.*llama-3-8b"):
        LlamaConfig.preset("llama-3-9b")
    assert LlamaConfig.preset("llama-3-8b", num_hidden_layers=2).num_hidden_layers == 2


def test_preset_with_overrides() -> None:
    config = LlamaConfig.preset("llama-3.2-1b", num_hidden_layers=2)
    assert config.num_hidden_layers == 2
    assert config.tie_word_embeddings and config.rope_scaling["factor"] == 32.0


def test_to_dict_names_the_family_and_leaves_out_extra() -> None:
    values = LlamaConfig(extra={"unknown": 1}).to_dict()
    assert values["model_type"] == "llama" and values["hidden_size"] == 4096
    assert "extra" not in values


def test_presets_are_not_shared() -> None:
    LlamaConfig.preset("llama-3.2-1b").rope_scaling["factor"] = 1.0
    assert LlamaConfig.preset("llama-3.2-1b").rope_scaling["factor"] == 32.0
    scaling = {"rope_type": "linear", "factor": 2.0}
    LlamaConfig.small(rope_scaling=scaling).rope_scaling["factor"] = 3.0
    assert scaling["factor"] == 2.0


def test_derived_fields_follow_the_fields_they_are_derived_from() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    config.hidden_size, config.num_attention_heads = 96, 6
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    copied = copy.deepcopy(config)
    copied.num_attention_heads = 3
    assert (copied.num_key_value_heads, copied.head_dim) == (3, 32)
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    config.num_key_value_heads, config.head_dim = 2, 8  # from now on they are given
    config.hidden_size, config.num_attention_heads = 64, 4
    assert (config.num_key_value_heads, config.head_dim) == (2, 8)
    config.head_dim = None  # type: ignore[assignment]
    assert config.head_dim == 16
    config.num_attention_heads = 6
    with pytest.raises(ConfigError, match=r"hidden_size 64 is not a multiple of .* 6; set"):
        LigerLlama(config)


def test_numbers_of_numpy_become_those_of_python() -> None:
    config = LlamaConfig(
        hidden_size=np.int64(64), num_attention_heads=4, rms_norm_eps=np.float32(1)
    )
    config.rope_theta = np.float32(5e5)
    config.validate()
    assert (config.head_dim, config.rms_norm_eps, config.rope_theta) == (16, 1.0, 5e5)
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_a_config_is_read_from_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"model_type": "llama", "rope_theta": 77.0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    asked = []

    def fetch(*args: Any) -> Path:
        asked.append(args)
        return tmp_path

    monkeypatch.setattr(hub, "_fetch", fetch)
    assert LlamaConfig.from_hf("some/model", revision="v1").rope_theta == 77.0
    assert asked == [("some/model", "v1", False)]  # without the weights
    assert LlamaConfig.from_hf(tmp_path).rope_theta == 77.0
    assert len(asked) == 1
    with pytest.raises(CheckpointError, match="there is no such folder"):
        LlamaConfig.from_hf(tmp_path / "absent")


def test_class_attributes_that_name_no_field_are_refused() -> None:
    @dataclass(kw_only=True)
    class Plain(ModelConfig):
        model_type = "plain"

    with pytest.raises(
        ConfigError, match=r"Plain\.activation_field names 'hidden_act', which is no"
    ):
        Plain.small()
    for attributes, complaint in (
        ({"key_aliases": {"n": "nothing"}}, "key_aliases names 'nothing', which is no field"),
        ({"largest": {"experts": 8}}, "largest names 'experts'"),
        ({"positive": ("gain",)}, "positive names 'gain'"),
        ({"sliding_windows": property(lambda _: [None])}, "sliding_windows returns 1 windows, exp"),
    ):
        cls = type("Own", (LlamaConfig,), attributes)
        with pytest.raises(ConfigError, match=rf"Own\.{complaint}"):
            cls.small()


def test_a_config_is_its_own_text_config() -> None:
    config = LlamaConfig()
    assert config.get_text_config(decoder=True) is config
