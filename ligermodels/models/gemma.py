"""Gemma 1: Llama with scaled embeddings, norm weights stored as w - 1, GELU and wide heads."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligermodels.converters.weight_map import WeightMap
from ligermodels.errors import ConfigError, short_repr
from ligermodels.layers import DecoderBlock, GatedMLP, RMSNorm
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderModel, attention_of
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.decoder_weight_map import decoder_weight_map


@dataclass(kw_only=True)
class GemmaConfig(ModelConfig):
    """Fields of a Gemma `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma"

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    hidden_act: str = "gelu_pytorch_tanh"
    attention_bias: bool = False

    def validate(self) -> None:
        """Check every field as ModelConfig does, and that hidden_activation agrees with hidden_act.

        The model uses only hidden_act.

        Raises:
            ConfigError: a field is invalid, or the two activations differ.
        """
        super().validate()
        other = self.extra.get("hidden_activation")
        tanh = ("gelu_pytorch_tanh", "gelu_new") if self.activation == "gelu_tanh" else ()
        if other not in (None, self.hidden_act, *tanh):
            raise ConfigError(
                f"config: hidden_activation is {short_repr(other)}, but hidden_act is "
                f"{self.hidden_act!r}; set both to the same activation"
            )

    @property
    def activation(self) -> str:
        """The MLP's activation. As in Gemma's first configs, "gelu" means "gelu_tanh"."""
        return "gelu_tanh" if self.hidden_act == "gelu" else super().activation


GemmaConfig.presets = {
    "gemma-2b": sizes(2048, 16384, 18, 8, 1),
    "gemma-7b": sizes(3072, 24576, 28, 16, 16),
}


def weight_map(config: GemmaConfig) -> WeightMap:
    """Return the map from parameters to the tensors of a Gemma checkpoint."""
    bias = config.attention_bias
    return decoder_weight_map(config, qkv_bias=bias, out_bias=bias)


def gemma_norm(config: ModelConfig, size: int) -> RMSNorm:
    """Return Gemma's norm: its factor is 1 + weight, and it rounds only once, at the end."""
    return RMSNorm(size, config.rms_norm_eps, offset=1.0, casting_mode="gemma")


@register
class LigerGemma(DecoderModel):
    """The Gemma model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = GemmaConfig
    config: GemmaConfig
    weight_map = staticmethod(weight_map)

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        self.build(
            norm=gemma_norm(config, config.hidden_size),
            embedding_scale=config.hidden_size**0.5,
        )

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        return DecoderBlock(
            attention_of(config, layer_index, bias=config.attention_bias),
            GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            gemma_norm(config, hidden),
            gemma_norm(config, hidden),
        )
