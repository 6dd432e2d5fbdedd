"""Ours and transformers read the same in every family's config.json and in its export."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import transformers

from ligermodels.converters.hf_config import to_hf
from ligermodels.errors import ConfigError
from ligermodels.models.auto import families
from ligermodels.models.config import ModelConfig
from tests.families import DECODERS

from . import hf_reading
from .conftest import parse
from .hf_reading import reading

LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
TOKENS = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}

EVERY: dict[str, dict[str, Any]] = {
    "nothing given": {},
    "keys of others": {"mine": {"nested": [1, 2.0, None]}, "pretraining_tp": 1, "use_cache": False},
    "dtype": {"torch_dtype": "bfloat16"},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "tokens": TOKENS,
    "no tokens": dict.fromkeys(TOKENS),
    "yarn": {"rope_scaling": YARN, "rope_theta": 5e5},
    "one kv head": {"num_key_value_heads": 1, "head_dim": 32},
    "no rope_scaling": {"rope_scaling": None, "rope_theta": 2e4},
}
QWEN: dict[str, dict[str, Any]] = {
    "kv heads null": {"num_key_value_heads": None, "num_attention_heads": 16},
    "window unused": {"sliding_window": 7},
    "window used": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    "window used, all defaults": {"use_sliding_window": True},
    "every layer slides": {"use_sliding_window": True, "max_window_layers": 0},
    "layer_types": {"use_sliding_window": True, "num_hidden_layers": 3, "layer_types": LAYERS},
    "layer_types null": {"use_sliding_window": True, "layer_types": None},
}
GEMMA2: dict[str, dict[str, Any]] = {
    "erf gelu": {"hidden_activation": "gelu"},
    "hidden_act is not read": {"hidden_act": "silu"},
    "attention_bias": {"attention_bias": True},
    "scalar": {"query_pre_attn_scalar": 144},
    "window": {"sliding_window": 12},
    "layer_types": {"num_hidden_layers": 3, "layer_types": LAYERS},
    "layer_types null": {"num_hidden_layers": 5, "layer_types": None},
    "logit cap": {"final_logit_softcapping": 12.5},
    "no logit cap": {"final_logit_softcapping": None},
}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "kv heads null": {"num_key_value_heads": None, "num_attention_heads": 8},
        "head_dim null": {"head_dim": None},
        "layer_types": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "flat rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 7e5}},
    },
    "mistral": {
        "window null": {"sliding_window": None},
        "window": {"sliding_window": 12},
        "head_dim": {"head_dim": 96},
        "head_dim null": {"head_dim": None, "hidden_size": 2048},
        "flat rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 7e5}},
    },
    "gemma": {
        "legacy gelu": {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        "silu": {"hidden_act": "silu"},
        "attention_bias": {"attention_bias": True},
    },
    "gemma2": {
        **GEMMA2,
        "score cap": {"attn_logit_softcapping": 2.5},
        "no score cap": {"attn_logit_softcapping": None},
    },
    "gemma3_text": {
        **GEMMA2,
        "pattern": {"sliding_window_pattern": 3, "num_hidden_layers": 7},
        "old rope": {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
        "old rope, theta inside": {"rope_scaling": {**LINEAR, "rope_theta": 7e5}},
        "new rope": {"rope_parameters": NESTED},
        "new rope, thetas beside": {
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}},
            "rope_theta": 4e5,
            "rope_local_base_freq": 5e4,
        },
        "new rope, one null": {
            "rope_parameters": {"full_attention": YARN, "sliding_attention": None}
        },
        "both ropes": {"rope_parameters": NESTED, "rope_scaling": YARN},
        "score cap null": {"attn_logit_softcapping": None},
    },
    "gemma4_text": {
        "window": {"sliding_window": 12},
        "the last layer is full": {"num_hidden_layers": 3, "layer_types": LAYERS},
        "sizes of full layers": {"global_head_dim": 64, "num_global_key_value_heads": 2},
        "sizes of layers": {
            "num_hidden_layers": 2,
            "per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 2}},
        },
        "experts": {
            "enable_moe_block": True,
            "num_experts": 12,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        "new rope": {"rope_parameters": NESTED},
        "logit cap": {"final_logit_softcapping": 30.0},
        "shared keys": {"num_kv_shared_layers": 12, "use_double_wide_mlp": True},
        "images see themselves": {"use_bidirectional_attention": "vision"},
    },
    "qwen2": {**QWEN, "head_dim": {"head_dim": 96}},
    "qwen3": {**QWEN, "head_dim": {"head_dim": 96}, "attention_bias": {"attention_bias": True}},
    "qwen3_moe": {
        "window unused": {"sliding_window": 7},
        "window used": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
        "head_dim": {"head_dim": 96},
        "attention_bias": {"attention_bias": True},
        "the old key of experts": {"num_experts": 12},
        "the new key of experts": {"num_local_experts": 12},
        "choices": {"num_experts_per_tok": 3, "norm_topk_prob": True},
        "dense layers": {"decoder_sparse_step": 3, "mlp_only_layers": [0, 2, 5]},
        "no dense layers": {"mlp_only_layers": []},
        "balance": {"output_router_logits": True, "router_aux_loss_coef": 0.01},
    },
    "mixtral": {
        "window": {"sliding_window": 12},
        "head_dim": {"head_dim": 96},
        "head_dim null": {"head_dim": None, "hidden_size": 2048},
        "experts": {"num_local_experts": 6, "num_experts_per_tok": 3},
        "the other key of experts": {"num_experts": 12},
        "no noise": {"router_jitter_noise": 0.0},
        "balance": {"output_router_logits": True, "router_aux_loss_coef": 0.01},
    },
}
FACTORS = {
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LENGTH = {"original_max_position_embeddings": 64}
OLMO3_ROPES = {
    "full_attention": {**YARN, "rope_theta": 9e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
OWN |= {
    "olmo2": {"attention_bias": {"attention_bias": True}},
    "olmo3": {
        "window": {"sliding_window": 12},
        "layer_types": {"num_hidden_layers": 3, "layer_types": LAYERS},
        "theta inside": {"rope_scaling": {**YARN, "rope_theta": 7e5}},
        "new rope": {"rope_parameters": OLMO3_ROPES},
        "new rope, one null": {
            "rope_parameters": {"full_attention": YARN, "sliding_attention": None}
        },
        "both ropes": {"rope_parameters": OLMO3_ROPES, "rope_scaling": YARN},
    },
    "granite": {"factors": FACTORS, "biases": {"attention_bias": True, "mlp_bias": True}},
    "granitemoehybrid": {
        "factors": FACTORS,
        "positions": {"position_embedding_type": "rope"},
        "no positions": {"position_embedding_type": "nope"},
        "new layer types": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        "mlp": {"shared_intermediate_size": 24},
    },
    "phi3": {
        "window": {"sliding_window": 12},
        "longrope": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
        **{
            f"longrope, named {name}": {"rope_parameters": LONGROPE | LENGTH | {"type": name}}
            | LENGTH
            for name in ("su", "yarn")
        },
        "longrope, length left out": {"rope_scaling": LONGROPE, "max_position_embeddings": 8192},
    },
    "smollm3": {
        "window unused": {"sliding_window": 7},
        "window used": {"use_sliding_window": True, "sliding_window": 7},
        "layer_types": {"use_sliding_window": True, "sliding_window": 7}
        | {"num_hidden_layers": 3, "layer_types": LAYERS},
        "interval": {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 7},
        "kv heads null": {"num_key_value_heads": None},
    },
    "ministral3": {
        "window": {"sliding_window": 12},
        "rope": {"rope_parameters": {**YARN, "rope_theta": 7e5, "llama_4_scaling_beta": 0.2}},
        "plain rope": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 7e5,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.3,
            }
        },
    },
}
DELTA = {
    "interval": {"full_attention_interval": 3, "num_hidden_layers": 7},
    "layer_types": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
    "new rope": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        }
    },
    "a gate of the output": {"attn_output_gate": True},
}
OWN |= {"qwen3_5_text": DELTA, "qwen3_5_moe_text": DELTA}
OWN = {family: {} for family in DECODERS} | OWN
# transformers reads no old spelling of Gemma 4's rope. In Phi-3 it takes yarn for longrope, which
# needs factors.
LEFT_OUT = {"gemma4_text": {n for n in EVERY if "rope_scaling" in EVERY[n]}, "phi3": {"yarn"}}
CASES = {
    family: [name for name in EVERY | own if name not in LEFT_OUT.get(family, ())]
    for family, own in OWN.items()
}
# transformers' defaults describe Mamba and experts.
DENSE = {"num_local_experts": 0, "layer_types": ["attention"] * 32}
BASE = {"granitemoehybrid": DENSE}


def raw_of(family: str, name: str) -> dict[str, Any]:
    return {"model_type": family, **BASE.get(family, {}), **(EVERY | OWN[family])[name]}


def read(raw: dict[str, Any]) -> ModelConfig:
    return parse(raw, families()[raw["model_type"]].config_class)


def ours(config: ModelConfig) -> dict[str, Any]:
    """Return what `hf_reading.reading` returns, for our config."""
    names = {*hf_reading.SAME, "head_dim", "activation", "sliding_windows"}
    names |= {n for n in (*hf_reading.OWN, "attn_logit_softcapping") if hasattr(config, n)}
    if config.model_type == "qwen3_5_moe_text":
        names.remove("intermediate_size")  # it has no dense MLP
    found = {name: getattr(config, name) for name in names}
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    rope_type = scaling.pop("rope_type")
    if rope_type in ("llama3", "yarn", "longrope"):
        scaling.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return found | {
        "theta": config.rope_theta,
        "local_theta": getattr(config, "rope_local_base_freq", None),
        "experts": getattr(config, getattr(config, "experts_field", ""), None),
        "mlp_only_layers": getattr(config, "mlp_only_layers", None) or [],
        "rope_type": rope_type,
        "scaling": scaling,
    }


@pytest.mark.parametrize("family", CASES)
def test_a_config_means_what_it_means_to_transformers(
    family: str, subtests: pytest.Subtests
) -> None:
    for name in CASES[family]:
        with subtests.test(name):
            raw = raw_of(family, name)
            config = read(raw)
            assert ours(config) == reading(raw)
            exported = to_hf(config)
            assert json.dumps({key: exported[key] for key in raw}) == json.dumps(raw)
            assert ours(read(exported)) == reading(exported) == reading(raw)
            assert config.extra == raw


@pytest.mark.parametrize("family", OWN)
def test_a_config_made_in_python_is_read_by_transformers(family: str) -> None:
    config = families()[family].config_class(num_hidden_layers=3, rope_theta=7e5, dtype="bfloat16")
    exported = json.loads(json.dumps(to_hf(config)))
    assert reading(exported) == ours(config)
    (architecture,) = exported["architectures"]
    causal = transformers.AutoModelForCausalLM._model_mapping
    assert architecture == causal[type(transformers.AutoConfig.for_model(family))].__name__
    again = read(exported)
    again.extra = {}
    assert again == config


def test_integers_are_exported_as_the_floats_that_transformers_insists_on() -> None:
    cls = families()["gemma3_text"].config_class
    config = cls(final_logit_softcapping=30, initializer_range=1, rope_theta=10000)
    exported = to_hf(config)
    assert repr(exported["final_logit_softcapping"]) == "30.0"
    assert reading(json.loads(json.dumps(exported))) == ours(config)


@pytest.mark.parametrize("family", OWN)
def test_null_is_refused_where_transformers_refuses_it(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(family).to_dict()
    names = {field.name for field in dataclasses.fields(families()[family].config_class)}
    names = names & theirs.keys() - {"rope_scaling", "dtype", "attention_dropout"}
    if family.startswith(
        ("gemma", "gpt_oss", "olmo3")
    ):  # Its layers use the window, so it may not be null.
        names -= {"sliding_window"}
    if family == "granitemoehybrid":  # transformers reads nulls with which it cannot compute
        names -= {*FACTORS, "num_local_experts", "layer_types"}
    differing = []
    for name in sorted(names):
        raw = {"model_type": family, **BASE.get(family, {}), name: None}
        try:
            expected: Any = reading(raw)
        except Exception:
            expected = "refused"
        try:
            found: Any = ours(read(raw))
        except ConfigError as error:
            assert name in str(error)
            found = "refused"
        if found != expected:
            differing.append((name, found, expected))
    assert not differing


def test_bad_values_are_refused_by_name(subtests: pytest.Subtests) -> None:
    for family, keys, message in (
        ("gemma", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' is 30.0"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; expected a pos"),
        ("gemma2", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is"),
        *((family, {"attention_dropout": 0.1}, "'attention_dropout' is 0.1") for family in OWN),
        *(
            (family, {"per_layer_config": {"0": {"top_k": 1}}}, "per_layer_config'? (is|has)")
            for family in OWN
        ),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is"),
        ("gemma4_text", {"num_kv_shared_layers": 29}, "the first 1 layers must have each of"),
        ("gemma4_text", {"global_head_dim": 63}, "layer 5 has 4 key heads of size 63"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block with num_experts None"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; expected an integer from 1"),
        ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types is .* but the layers"),
        ("llama", {"layer_types": "full"}, "layer_types is 'full', but the layers of this 'llama'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not implemented"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, expected num"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 26}, "expected a list of 'full_attent"),
        ("gemma2", {"sliding_window": None}, "sliding_window is None, but layer 0 is of type"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; expected"),
        ("gemma3_text", {"rope_local_base_freq": -1}, "'rope_local_base_freq' is -1, expected a"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 5}}, "full_attention' is 5; this"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR}}, "is not implemented"),
        ("phi3", {"rope_scaling": LINEAR}, "rope_scaling has rope_type 'linear', expected 'longr"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3; expected a"),
        (
            "phi3",
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 8}},
            "has 8 numbers, expected half of the rotated part",
        ),
        ("granitemoehybrid", {"num_local_experts": 8}, "with experts is not implemented"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"] * 32},
            "expected a list of 'attention' and 'full_attention'",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, expected 36"),
        ("ministral3", {"rope_scaling": {**YARN, "llama_4_scaling_beta": "x"}}, "llama_4_scaling"),
        ("llama", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "no rope here reads"),
        ("qwen2", {"max_window_layers": "2"}, "'max_window_layers' is '2', expected an integer"),
        (
            "mixtral",
            {"router_jitter_noise": 0.1},
            "'router_jitter_noise' is 0.1, which changes the",
        ),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok is 8; expected at most num_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected an integer"),
        ("qwen3", {"rope_parameters": {"full_attention": LINEAR}}, "rope per layer type is not im"),
    ):
        with subtests.test(f"{family}: {keys}"):
            with pytest.raises(ConfigError, match=message) as caught:
                read({"model_type": family, **keys})
            assert len(str(caught.value).splitlines()) == 1
