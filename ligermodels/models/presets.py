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


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


_MISTRAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
_MISTRAL_FULL = _MISTRAL | {"sliding_window": None, "rope_theta": 1e6}

MISTRAL: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": _MISTRAL,
    "mistral-7b-v0.2": _MISTRAL_FULL,
    "mistral-7b-v0.3": _MISTRAL_FULL | {"vocab_size": 32768},
    "mistral-nemo-12b": _MISTRAL_FULL
    | _sizes(5120, 14336, 40, 32, 8, head_dim=128, vocab_size=131072)
    | {"max_position_embeddings": 131072},
    "mistral-small-22b": _MISTRAL_FULL
    | _sizes(6144, 16384, 56, 48, 8, head_dim=128, vocab_size=32768),
    "mistral-small-24b": _MISTRAL_FULL
    | _sizes(5120, 32768, 40, 32, 8, head_dim=128, vocab_size=131072)
    | {"rope_theta": 1e8},
}

GEMMA: dict[str, dict[str, Any]] = {
    "gemma-2b": _sizes(2048, 16384, 18, 8, 1),
    "gemma-7b": _sizes(3072, 24576, 28, 16, 16),
}

GEMMA2: dict[str, dict[str, Any]] = {
    "gemma-2-2b": _sizes(2304, 9216, 26, 8, 4),
    "gemma-2-9b": _sizes(3584, 14336, 42, 16, 8),
    "gemma-2-27b": _sizes(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
}

_GEMMA3_TEXT = {"vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512}
# The text models of those with a vision tower.
_GEMMA3_TOWER = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}

GEMMA3: dict[str, dict[str, Any]] = {
    "gemma-3-270m": _GEMMA3_TEXT | _sizes(640, 2048, 18, 4, 1),
    "gemma-3-1b": _GEMMA3_TEXT | _sizes(1152, 6912, 26, 4, 1),
    "gemma-3-4b": _GEMMA3_TOWER | _sizes(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _GEMMA3_TOWER | _sizes(3840, 15360, 48, 16, 8),
    "gemma-3-27b": _GEMMA3_TOWER
    | _sizes(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
}

_QWEN2 = {
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
_QWEN2_LARGE = _QWEN2 | {"vocab_size": 152064}
_QWEN2_WIDE = _QWEN2_LARGE | {"rms_norm_eps": 1e-5}
_TIED = {"tie_word_embeddings": True}
_SHORT = {"max_position_embeddings": 32768}
_QWEN_05B = _sizes(896, 4864, 24, 14, 2)
_QWEN_15B = _sizes(1536, 8960, 28, 12, 2)
_QWEN_7B = _sizes(3584, 18944, 28, 28, 4)
_QWEN_72B = _sizes(8192, 29568, 80, 64, 8)

QWEN2: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _QWEN2 | _QWEN_05B | _TIED,
    "qwen2-1.5b": _QWEN2 | _QWEN_15B | _TIED,
    "qwen2-7b": _QWEN2_LARGE | _QWEN_7B,
    "qwen2-72b": _QWEN2_WIDE | _QWEN_72B,
    "qwen2.5-0.5b": _QWEN2 | _QWEN_05B | _TIED | _SHORT,
    "qwen2.5-1.5b": _QWEN2 | _QWEN_15B | _TIED,
    "qwen2.5-3b": _QWEN2 | _sizes(2048, 11008, 36, 16, 2) | _TIED | _SHORT,
    "qwen2.5-7b": _QWEN2_LARGE | _QWEN_7B,
    "qwen2.5-14b": _QWEN2_WIDE | _sizes(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _QWEN2_WIDE | _sizes(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _QWEN2_WIDE | _QWEN_72B,
}

_QWEN3 = {
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8) | _TIED,
    "qwen3-1.7b": _QWEN3 | _sizes(2048, 6144, 28, 16, 8) | _TIED,
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32, 8) | _TIED,
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, 8),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40, 8),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64, 8),
}
