"""Published model sizes as data: the config fields that differ from the family's defaults."""

from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA31 = _LLAMA3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
}
_LLAMA32 = _LLAMA31 | {
    "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_SIZE_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_SIZE_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}
_SIZE_8B = _SIZE_7B | {"intermediate_size": 14336, "num_key_value_heads": 8}
_SIZE_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_LLAMA2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_SMOLLM2 = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

LLAMA: dict[str, dict[str, Any]] = {
    "llama-1-7b": _SIZE_7B,
    "llama-2-7b": _SIZE_7B | _LLAMA2,
    "llama-2-13b": _SIZE_13B | _LLAMA2,
    "llama-2-70b": _SIZE_70B | _LLAMA2,
    "codellama-7b": _SIZE_7B
    | {
        "vocab_size": 32016,
        "rope_theta": 1e6,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
    },
    "llama-3-8b": _LLAMA3 | _SIZE_8B | {"max_position_embeddings": 8192},
    "llama-3-70b": _LLAMA3 | _SIZE_70B | {"max_position_embeddings": 8192},
    "llama-3.1-8b": _LLAMA31 | _SIZE_8B,
    "llama-3.1-70b": _LLAMA31 | _SIZE_70B,
    "llama-3.1-405b": _LLAMA31
    | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    },
    "llama-3.2-1b": _LLAMA32
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "llama-3.2-3b": _LLAMA32
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama-3.3-70b": _LLAMA31 | _SIZE_70B,
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    },
    "smollm2-135m": _SMOLLM2
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
    },
    "smollm2-360m": _SMOLLM2
    | {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "rope_theta": 100000.0,
    },
    "smollm2-1.7b": _SMOLLM2
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "rope_theta": 130000.0,
    },
}
