"""Gemma 2: Gemma with capped scores and logits, more norms and a window in every second layer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import WeightMap
from ligermodels.layers import GatedMLP, SandwichBlock
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderModel, attention_of
from ligermodels.models.config import ModelConfig, sizes, windows_from_types
from ligermodels.models.decoder_weight_map import decoder_weight_map
from ligermodels.models.gemma import gemma_norm


@dataclass(kw_only=True)
class SandwichConfig(ModelConfig):
    """The fields that Gemma 2 and Gemma 3 have in common, with HF's defaults."""

    activation_field: ClassVar[str] = "hidden_activation"
    largest = ModelConfig.largest | {"query_pre_attn_scalar": 2**32}
    positive = (*ModelConfig.positive, "final_logit_softcapping")
    small_fields: ClassVar[dict[str, Any]] = {"query_pre_attn_scalar": 20, "sliding_window": 7}

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None  # None: the `sliding_windows` of the family


@dataclass(kw_only=True)
class Gemma2Config(SandwichConfig):
    """Fields of a Gemma 2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma2"
    positive = (*SandwichConfig.positive, "attn_logit_softcapping")

    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    @property
    def sliding_windows(self) -> list[int | None]:
        """The window of layers 0, 2, 4, ..., or of those in layer_types; None for the others."""
        pattern = ["sliding_attention", "full_attention"] * self.num_hidden_layers
        types = self.layer_types or pattern[: self.num_hidden_layers]
        return windows_from_types(types, self.sliding_window)


Gemma2Config.presets = {
    "gemma-2-2b": sizes(2304, 9216, 26, 8, 4),
    "gemma-2-9b": sizes(3584, 14336, 42, 16, 8),
    "gemma-2-27b": sizes(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
}


SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def weight_map(config: Gemma2Config) -> WeightMap:
    """Return the map from parameters to the tensors of a Gemma 2 checkpoint."""
    bias = config.attention_bias
    return decoder_weight_map(config, qkv_bias=bias, out_bias=bias, norms=SANDWICH_NORMS)


@register
class LigerGemma2(DecoderModel):
    """The Gemma 2 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Gemma2Config
    config: Gemma2Config
    weight_map = staticmethod(weight_map)

    def __init__(self, config: Gemma2Config) -> None:
        super().__init__(config)
        self.build(
            norm=gemma_norm(config, config.hidden_size),
            embedding_scale=config.hidden_size**0.5,
            logit_softcap=config.final_logit_softcapping,
        )

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h)))."""
        config, hidden = self.config, self.config.hidden_size
        return SandwichBlock(
            attention_of(
                config,
                layer_index,
                bias=config.attention_bias,
                scale=config.query_pre_attn_scalar**-0.5,
                softcap=config.attn_logit_softcapping,
            ),
            GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            *(gemma_norm(config, hidden) for _ in SANDWICH_NORMS),
        )
