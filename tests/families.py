"""The families, for every test that iterates over them. A new family is one entry here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

Json = dict[str, Any]
WINDOW = 5  # the window in tests of a few tokens


# A gated delta net of few and small heads in every second layer.
DELTA: Json = {
    "head_dim": 8,  # of which rope rotates a quarter
    "full_attention_interval": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True)
class Family:
    """The facts about a family that tests need; `Json` holds fields of its config.

    Attributes:
        hf: the names of transformers' config class and model class.
        vocabulary: the vocabulary size of published checkpoints.
        sliding: the fields, besides sliding_window, that give some layers a window. None: no layer
            can have one.
        own: other fields that Llama lacks, with values that matter within a few tokens.
        experts: fields that make experts few and small.
        mixers: fields that make gated delta nets few and small.
        biases: the fields that give every projection that can have a bias one.
        training: other fields for training beside transformers.
        gpu: other fields on a GPU, where windows have 64 tokens.
        rounded: other fields where 16 bit is compared with 32: each token gets every expert, as
            rounding could choose others, which would hide its other errors.
        defaults: the values of fields that a config.json leaves out, if a tiny model can have them.
        takes_head_dim: whether transformers' config has head_dim.
        norm_weight: the weight with which a norm does not scale its input.
        text_model: for a wrapper with other towers, the family of its text model.
        composed: whether its layers are those of other families, put together in another way. The
            default run takes fewer of its cases.
        base: other fields of transformers' config from which every comparison starts.
        features: name of a comparison of a composed family -> fields that it changes.
    """

    hf: tuple[str, str]
    vocabulary: int
    sliding: Json | None = None
    own: Json = field(default_factory=dict)
    experts: Json = field(default_factory=dict)
    mixers: Json = field(default_factory=dict)
    biases: Json = field(default_factory=dict)
    training: Json = field(default_factory=dict)
    gpu: Json = field(default_factory=dict)
    rounded: Json = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    takes_head_dim: bool = True
    norm_weight: float = 1.0
    text_model: str | None = None
    composed: bool = False
    base: Json = field(default_factory=dict)
    features: dict[str, Json] = field(default_factory=dict)


_FACTORS = {
    "embedding_multiplier": 7.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.4,
    "logits_scaling": 3.0,
}
_OTHER_FACTORS = {
    "embedding_multiplier": 0.5,
    "residual_multiplier": 1.7,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.7,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_YARN |= {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}


FAMILIES = {
    "llama": Family(
        hf=("LlamaConfig", "LlamaForCausalLM"),
        vocabulary=128256,
        biases={"attention_bias": True, "mlp_bias": True},
        defaults={"num_key_value_heads": None},
    ),
    "mistral": Family(
        hf=("MistralConfig", "MistralForCausalLM"),
        vocabulary=32768,
        sliding={},
        gpu={"sliding_window": 64},
        defaults={"num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    "gemma": Family(
        hf=("GemmaConfig", "GemmaForCausalLM"),
        vocabulary=256000,
        biases={"attention_bias": True},
        gpu={"head_dim": 256},
        defaults={"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
        norm_weight=0.0,
    ),
    "gemma2": Family(
        hf=("Gemma2Config", "Gemma2ForCausalLM"),
        vocabulary=256000,
        sliding={},
        own={
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 20,
        },
        biases={"attention_bias": True},
        training={"query_pre_attn_scalar": 1, "attn_logit_softcapping": 0.25},
        gpu={"head_dim": 64, "sliding_window": 64, "query_pre_attn_scalar": 100},
        defaults={
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norm_weight=0.0,
    ),
    "gemma3_text": Family(
        hf=("Gemma3TextConfig", "Gemma3ForCausalLM"),
        vocabulary=262144,
        sliding={"sliding_window_pattern": 2},
        biases={"attention_bias": True},
        gpu={"head_dim": 64, "sliding_window": 64, "sliding_window_pattern": 3},
        defaults={
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
        },
        norm_weight=0.0,
    ),
    "gemma3": Family(
        hf=("Gemma3Config", "Gemma3ForConditionalGeneration"),
        vocabulary=262208,
        norm_weight=0.0,
        text_model="gemma3_text",
    ),
    "gemma4_text": Family(
        hf=("Gemma4TextConfig", "Gemma4ForCausalLM"),
        vocabulary=262144,
        sliding={
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        own={"final_logit_softcapping": 5.0},
        experts={
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        biases={"attention_bias": True},
        gpu={
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 64,
            "num_experts": 16,
            "top_k_experts": 4,
            "moe_intermediate_size": 256,
        },
        rounded={"top_k_experts": 5},
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    "gemma4": Family(
        hf=("Gemma4Config", "Gemma4ForConditionalGeneration"),
        vocabulary=262144,
        text_model="gemma4_text",
    ),
    "qwen2": Family(
        hf=("Qwen2Config", "Qwen2ForCausalLM"),
        vocabulary=151936,
        sliding={"use_sliding_window": True, "max_window_layers": 1},
        training={"tie_word_embeddings": True},
        gpu={"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        defaults={"hidden_size": 128, "num_attention_heads": 32, "num_key_value_heads": 32},
        takes_head_dim=False,
    ),
    "qwen3": Family(
        hf=("Qwen3Config", "Qwen3ForCausalLM"),
        vocabulary=151936,
        sliding={"use_sliding_window": True, "max_window_layers": 1},
        biases={"attention_bias": True},
        gpu={"head_dim": 128},
        defaults={"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        hf=("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        vocabulary=151936,
        sliding={"use_sliding_window": True},
        experts={
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        biases={"attention_bias": True},
        gpu={"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
        rounded={"num_experts_per_tok": 5},
        defaults={
            "hidden_size": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        takes_head_dim=False,
    ),
    "qwen3_5_text": Family(
        hf=("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
        vocabulary=248320,
        mixers=DELTA,
        biases={"attention_bias": True},
        gpu=DELTA | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256},
        defaults={
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "head_dim": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        norm_weight=0.0,
    ),
    "qwen3_5": Family(
        hf=("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
        vocabulary=248320,
        norm_weight=0.0,
        text_model="qwen3_5_text",
    ),
    "qwen3_5_moe_text": Family(
        hf=("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        vocabulary=248320,
        mixers=DELTA,
        experts={
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
        biases={"attention_bias": True},
        gpu=DELTA
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
        | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
        rounded={"num_experts_per_tok": 5},
        defaults={
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "head_dim": 256,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.001,
        },
        norm_weight=0.0,
    ),
    "qwen3_5_moe": Family(
        hf=("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        vocabulary=248320,
        norm_weight=0.0,
        rounded={"num_experts_per_tok": 5},
        text_model="qwen3_5_moe_text",
    ),
    "mixtral": Family(
        hf=("MixtralConfig", "MixtralForCausalLM"),
        vocabulary=32000,
        sliding={},
        experts={"num_local_experts": 5, "num_experts_per_tok": 2},
        gpu={"sliding_window": 64},
        rounded={"num_experts_per_tok": 5},
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "gpt_oss": Family(
        hf=("GptOssConfig", "GptOssForCausalLM"),
        vocabulary=201088,
        sliding={},
        own={"swiglu_limit": 0.7},
        rounded={"num_experts_per_tok": 5},
        experts={"num_local_experts": 5, "num_experts_per_tok": 2},
        gpu={
            "head_dim": 64,
            "sliding_window": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        defaults={
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
            "head_dim": 64,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "olmo2": Family(
        hf=("Olmo2Config", "Olmo2ForCausalLM"),
        vocabulary=100352,
        biases={"attention_bias": True},
        defaults={"num_key_value_heads": None},
        takes_head_dim=False,
        composed=True,
    ),
    "olmo3": Family(
        hf=("Olmo3Config", "Olmo3ForCausalLM"),
        vocabulary=100278,
        sliding={},
        biases={"attention_bias": True},
        gpu={"sliding_window": 64},
        rounded={"num_hidden_layers": 4},
        defaults={"num_key_value_heads": None},
        takes_head_dim=False,
        composed=True,
        base={"num_hidden_layers": 4},  # of which the last is full
        features={
            "layer_types": {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "yarn of the full layers": {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "attention_factor": 1.2,
                        "original_max_position_embeddings": 16,
                        "rope_theta": 5e5,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                },
            },
        },
    ),
    "granite": Family(
        hf=("GraniteConfig", "GraniteForCausalLM"),
        vocabulary=49159,
        own=_FACTORS,
        biases={"attention_bias": True, "mlp_bias": True},
        gpu=_FACTORS,
        defaults={"num_key_value_heads": None},
        takes_head_dim=False,
        composed=True,
        base=_FACTORS,
        features={"other factors": _OTHER_FACTORS},
    ),
    "granitemoehybrid": Family(
        hf=("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
        vocabulary=100352,
        own={
            **_FACTORS,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
        },
        biases={"attention_bias": True},
        gpu={
            **_FACTORS,
            "shared_intermediate_size": 1536,
            "position_embedding_type": "rope",
        },
        takes_head_dim=False,
        composed=True,
        base={
            **_FACTORS,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "mamba_n_heads": 4,
        },
        features={
            "other factors": _OTHER_FACTORS,
            "no positions": {"position_embedding_type": "nope"},
        },
    ),
    "phi3": Family(
        hf=("Phi3Config", "Phi3ForCausalLM"),
        vocabulary=100352,
        sliding={},
        own={"partial_rotary_factor": 0.75},
        gpu={"partial_rotary_factor": 0.75, "sliding_window": 64},
        defaults={"num_key_value_heads": None},
        takes_head_dim=False,
        composed=True,
        base={"partial_rotary_factor": 0.5},
        features={"whole heads rotated": {"partial_rotary_factor": 1.0}},
    ),
    "smollm3": Family(
        hf=("SmolLM3Config", "SmolLM3ForCausalLM"),
        vocabulary=128256,
        sliding={"use_sliding_window": True},
        own={"no_rope_layer_interval": 2},
        biases={"attention_bias": True, "mlp_bias": True},
        gpu={"no_rope_layer_interval": 2},
        takes_head_dim=False,
        composed=True,
        base={"no_rope_layer_interval": 2},
        features={
            "no_rope_layers": {"no_rope_layers": [0, 1]},
            "windows with positions": {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
    ),
    "ministral3": Family(
        hf=("Ministral3Config", "Ministral3ForCausalLM"),
        vocabulary=131072,
        sliding={},
        own={"rope_scaling": _YARN},
        gpu={"rope_scaling": _YARN, "sliding_window": 64},
        composed=True,
        base={"rope_parameters": {**_YARN, "rope_theta": 1e4}},
        features={
            "factors of 1": {
                "rope_parameters": {**_YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.0}
            },
        },
    ),
    "mistral3": Family(
        hf=("Mistral3Config", "Mistral3ForConditionalGeneration"),
        vocabulary=131072,
        composed=True,
        text_model="ministral3",
    ),
}
# The families that are not wrappers around another one.
DECODERS = {name: family for name, family in FAMILIES.items() if family.text_model is None}


def windows(family: str, width: int) -> Json:
    """Return fields that give some layers a window of `width` tokens, if the family has such."""
    sliding = FAMILIES[family].sliding
    return {} if sliding is None else {**sliding, "sliding_window": width}


def sampled(names: Iterable[str]) -> list[Any]:
    """Return the parameters of a test that do without some families by default.

    They are Mixtral, composed ones, and the wrappers of Gemma 4 and Qwen3.5, which have the classes
    of their text models.

    Mixtral's attention is that of Mistral, and its experts are those of Qwen3-MoE.
    """
    return [
        pytest.param(x, marks=pytest.mark.long)
        if x in ("mixtral", "gemma4", "qwen3_5", "qwen3_5_moe") or FAMILIES[x].composed
        else x
        for x in names
    ]


# Each family's fields that Llama lacks, with windows of WINDOW tokens.
OWN = {
    name: windows(name, WINDOW) | family.own | family.experts | family.mixers
    for name, family in DECODERS.items()
}
