"""Llama 1 to 3.3, and other models of the same architecture (TinyLlama, CodeLlama, SmolLM2)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class LlamaConfig(ModelConfig):
    """Fields of a Llama `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "llama"

    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False


_LLAMA2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_LLAMA3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA31 = _LLAMA3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
}
_LLAMA32 = _LLAMA31 | {
    "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_SMOLLM2 = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

LlamaConfig.presets = {
    "llama-1-7b": sizes(4096, 11008, 32, 32),
    "llama-2-7b": _LLAMA2 | sizes(4096, 11008, 32, 32),
    "llama-2-13b": _LLAMA2 | sizes(5120, 13824, 40, 40),
    "llama-2-70b": _LLAMA2 | sizes(8192, 28672, 80, 64, 8),
    "codellama-7b": {
        **sizes(4096, 11008, 32, 32, vocab_size=32016, rope_theta=1e6, rms_norm_eps=1e-5),
        "max_position_embeddings": 16384,
    },
    "llama-3-8b": _LLAMA3 | sizes(4096, 14336, 32, 32, 8),
    "llama-3-70b": _LLAMA3 | sizes(8192, 28672, 80, 64, 8),
    "llama-3.1-8b": _LLAMA31 | sizes(4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _LLAMA31 | sizes(8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _LLAMA31 | sizes(16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _LLAMA32 | sizes(2048, 8192, 16, 32, 8, head_dim=64),
    "llama-3.2-3b": _LLAMA32 | sizes(3072, 8192, 28, 24, 8, head_dim=128),
    "llama-3.3-70b": _LLAMA31 | sizes(8192, 28672, 80, 64, 8),
    "tinyllama-1.1b": sizes(2048, 5632, 22, 32, 4, rms_norm_eps=1e-5),
    "smollm2-135m": _SMOLLM2 | sizes(576, 1536, 30, 9, 3, rope_theta=100000.0),
    "smollm2-360m": _SMOLLM2 | sizes(960, 2560, 32, 15, 5, rope_theta=100000.0),
    "smollm2-1.7b": _SMOLLM2 | sizes(2048, 8192, 24, 32, rope_theta=130000.0),
}


@register
class LigerLlama(FamilyModel):
    """The Llama model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = LlamaConfig
    config: LlamaConfig

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(self.attention_of(layer_index), self.mlp_of())
