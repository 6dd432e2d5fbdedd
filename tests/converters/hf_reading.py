"""Return what transformers reads in a config.json."""

from __future__ import annotations

import copy
from typing import Any

import transformers

Json = dict[str, Any]
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
)
OWN = (
    *("attention_bias", "mlp_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
    *("num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size", "decoder_sparse_step"),
    *("output_router_logits", "router_aux_loss_coef", "hidden_size_per_layer_input"),
    *("num_kv_shared_layers", "attention_k_eq_v", "enable_moe_block", "top_k_experts"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("shared_intermediate_size", "position_embedding_type"),
)
OF_EXPERTS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}
NO_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "max_position_embeddings"}


def reading(raw: Json) -> Json:
    """Return the meaning of `raw` to transformers, under names that our config has as well."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    kind = config.model_type
    config.allow_global_per_layer_attribute_access = True  # or those of Gemma 4 cannot be read
    found = {name: getattr(config, name, None) for name in SAME}
    if kind == "qwen3_5_moe_text":
        del found["intermediate_size"]  # it has no dense MLP
    found |= {name: getattr(config, name) for name in OWN if hasattr(config, name)}
    # In most families an alias; Gemma 4 compares its own field.
    experts = None if kind == "gemma4_text" else getattr(config, "num_experts", None)
    found["experts"] = getattr(config, "num_local_experts", experts)
    if kind == "granitemoehybrid":  # without experts
        found = {name: value for name, value in found.items() if name not in OF_EXPERTS}
        found["experts"] = found["experts"] or None
    found["mlp_only_layers"] = getattr(config, "mlp_only_layers", None) or []
    head_dim = getattr(config, "head_dim", None)
    found["head_dim"] = head_dim or config.hidden_size // config.num_attention_heads
    default = type(config)()  # this lacks keys of `raw` that are not the family's
    name = config.hidden_act if hasattr(default, "hidden_act") else config.hidden_activation
    found["activation"] = ACTIVATIONS.get(name, name)
    if kind == "gpt_oss":  # whatever its config says
        found["activation"] = "clamped SwiGLU"
    if hasattr(config, "attn_logit_softcapping") and kind != "gemma3_text":  # Gemma 3 ignores it
        found["attn_logit_softcapping"] = config.attn_logit_softcapping
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or []
    if kind in ("mistral", "mixtral", "qwen3_moe", "phi3", "ministral3"):
        types = ["sliding_attention"] * config.num_hidden_layers
    found["sliding_windows"] = [
        window if layer == "sliding_attention" else None for layer in types
    ] or [None] * config.num_hidden_layers
    return found | rope(config)


def rope(config: Any) -> Json:
    """Return the thetas and the scaling of the full layers; plain rope has an empty scaling."""
    local, scaling = None, config.rope_parameters
    if "full_attention" in scaling:
        local = scaling["sliding_attention"]["rope_theta"]
        assert scaling["sliding_attention"]["rope_type"] == "default"
        scaling = scaling["full_attention"]
    theta = scaling["rope_theta"]
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    left = NO_ROPE - ({"partial_rotary_factor"} if rope_type == "proportional" else set())
    numbers = {key: value for key, value in scaling.items() if key not in left}
    if rope_type in ("llama3", "yarn", "longrope"):
        numbers.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    found = {"theta": theta, "rope_type": rope_type, "local_theta": local}
    scaled = rope_type != "default" or "llama_4_scaling_beta" in numbers
    return found | {"scaling": numbers if scaled else {}}
