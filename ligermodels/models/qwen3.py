"""Qwen3, dense models: Llama with norms on q and k of each head. Biases are optional."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.family import FamilyModel
from ligermodels.models.qwen2 import Qwen2Config


@dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    """The fields of Qwen2, an independent head_dim, and attention_bias."""

    model_type: ClassVar[str] = "qwen3"

    head_dim: int = 128
    attention_bias: bool = False


_QWEN3 = {
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

Qwen3Config.presets = {
    "qwen3-0.6b": _QWEN3 | sizes(1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-1.7b": _QWEN3 | sizes(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "qwen3-4b": _QWEN3 | sizes(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "qwen3-8b": _QWEN3 | sizes(4096, 12288, 36, 32, 8),
    "qwen3-14b": _QWEN3 | sizes(5120, 17408, 40, 40, 8),
    "qwen3-32b": _QWEN3 | sizes(5120, 25600, 64, 64, 8),
}


@register
class LigerQwen3(FamilyModel):
    """The Qwen3 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3Config
    config: Qwen3Config

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(self.attention_of(layer_index, head_norms=True), self.mlp_of())
