"""Gemma 1: Llama with scaled embeddings, norm weights stored as w - 1, GELU and wide heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class GemmaFields(ModelConfig):
    """The fields that all versions of Gemma have in common, with HF's defaults."""

    vocab_size: int = 256000
    head_dim: int = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    attention_bias: bool = False


@dataclass(kw_only=True)
class GemmaConfig(GemmaFields):
    """Fields of a Gemma `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma"

    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def activation(self) -> str:
        """The MLP's activation. As in Gemma's first configs, "gelu" means "gelu_tanh"."""
        return "gelu_tanh" if self.hidden_act == "gelu" else super().activation


GemmaConfig.presets = {
    "gemma-2b": sizes(2048, 16384, 18, 8, 1),
    "gemma-7b": sizes(3072, 24576, 28, 16, 16),
}


class GemmaModel(FamilyModel):
    """What the models of Gemma 1 to 3 have in common: scaled embeddings and norms of 1 + weight."""

    # The factor is 1 + weight, and they round only once, at the end.
    norm_options: ClassVar[dict[str, Any]] = {"offset": 1.0, "casting_mode": "gemma"}

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__(config, embedding_scale=config.hidden_size**0.5, **options)


@register
class LigerGemma(GemmaModel):
    """The Gemma model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = GemmaConfig
    config: GemmaConfig

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(self.attention_of(layer_index), self.mlp_of())
