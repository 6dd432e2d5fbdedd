"""Gemma 2: Gemma with capped scores and logits, more norms and a window in every second layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import SandwichBlock
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.gemma import GemmaFields, GemmaModel


@dataclass(kw_only=True)
class SandwichConfig(GemmaFields):
    """The fields that Gemma 2 and Gemma 3 have in common, with HF's defaults."""

    activation_field: ClassVar[str] = "hidden_activation"
    largest = ModelConfig.largest | {"query_pre_attn_scalar": 2**32}
    positive = (*ModelConfig.positive, "final_logit_softcapping")
    small_fields: ClassVar[dict[str, Any]] = {"query_pre_attn_scalar": 20, "sliding_window": 7}

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None  # None: what `slides` says


@dataclass(kw_only=True)
class Gemma2Config(SandwichConfig):
    """Fields of a Gemma 2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma2"
    positive = (*SandwichConfig.positive, "attn_logit_softcapping")

    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: layers 0, 2, 4, ... do."""
        return layer_index % 2 == 0


Gemma2Config.presets = {
    "gemma-2-2b": sizes(2304, 9216, 26, 8, 4),
    "gemma-2-9b": sizes(3584, 14336, 42, 16, 8),
    "gemma-2-27b": sizes(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
}


@register
class LigerGemma2(GemmaModel):
    """The Gemma 2 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Gemma2Config
    config: Gemma2Config

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h)))."""
        config = self.config
        attention = self.attention_of(
            layer_index,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        return SandwichBlock(attention, self.mlp_of(), *(self.norm_of() for _ in range(4)))
