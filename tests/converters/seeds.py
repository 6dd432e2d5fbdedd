"""Make valid tiny checkpoints of every family, which the fuzz test then damages."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors.torch import save

from tests.families import OWN

from .second_opinion import CONFIG, INDEX, SINGLE, State

SIZES = {
    "vocab_size": 22,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
# Fields of the good checkpoints besides the sizes; some families have several configs.
SEEDS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"rope_scaling": LLAMA3, "rope_theta": 5e5}, {"rope_scaling": YARN}],
    "mistral": [{"sliding_window": 5, "head_dim": 6}, {"sliding_window": None}],
    "gemma": [{"head_dim": 8}],
    "gemma2": [{"head_dim": 8, "sliding_window": 5}],
    "gemma3_text": [{"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}],
    "gemma3": [{"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}],
    "qwen3": [{"head_dim": 4}, {"head_dim": 4, "rope_scaling": LONG}],
}


@dataclass
class Seed:
    """A valid checkpoint of a family."""

    family: str
    files: State


def seeds(family: str) -> list[Seed]:
    """Make valid checkpoints: each config, tied and untied, as one file and as shards."""
    made = []
    for number, extra in enumerate(SEEDS.get(family, [OWN.get(family, {})])):
        for tied in (False, True):
            torch.manual_seed(number)
            text_family = "gemma3_text" if family == "gemma3" else family
            config = transformers.AutoConfig.for_model(
                text_family, **copy.deepcopy({**SIZES, **extra, "tie_word_embeddings": tied})
            )
            model = transformers.AutoModelForCausalLM.from_config(config)
            tensors = {name: torch.randn_like(t) for name, t in model.state_dict().items()}
            if tied:
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            kept = {n: t.bfloat16() for n, t in tensors.items() if not (tied and n[:2] == "lm")}
            raw = {**SIZES, **extra, "tie_word_embeddings": tied, "model_type": text_family}
            if family != text_family:
                kept = {f"language_model.{name}": tensor for name, tensor in kept.items()}
                kept["vision_tower.weight"] = torch.ones(4, 2)
                kept["multi_modal_projector.weight"] = torch.ones(2)
                raw = {"model_type": family, "text_config": raw, "vision_config": {"layers": 1}}
                raw["tie_word_embeddings"] = tied
            raw |= {"architectures": [type(model).__name__], "torch_dtype": "bfloat16"}
            raw |= {"auto_map": {"AutoModelForCausalLM": "canary.Model"}, "unknown": [1, {"a": 2}]}
            common: State = {CONFIG: json.dumps(raw).encode()}
            made.append(Seed(family, {**common, SINGLE: save(kept, {"format": "pt"})}))
            made.append(Seed(family, {**common, **_shards(kept, 3)}))
    return made


def _shards(tensors: dict[str, torch.Tensor], count: int) -> State:
    files: State = {}
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {n: t for j, (n, t) in enumerate(tensors.items()) if j % count == i}
        files[name] = save(part, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    files[INDEX] = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
    return files
