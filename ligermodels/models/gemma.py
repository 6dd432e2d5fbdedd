"""Gemma (1): scaled embeddings, norm weights stored as w - 1, GELU, wide heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.errors import ConfigError, shown
from ligermodels.layers import (
    Attention,
    DecoderBlock,
    GatedMLP,
    LossHead,
    RMSNorm,
    RotaryEmbedding,
    ScaledEmbedding,
)
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.models.presets import GEMMA


@dataclass(kw_only=True)
class GemmaConfig(ModelConfig):
    """Fields of a Gemma `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma"
    presets: ClassVar[dict[str, dict[str, Any]]] = GEMMA

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
        """As in ModelConfig; hidden_activation, which is not read here, has to agree."""
        super().validate()
        other = self.extra.get("hidden_activation")
        tanh = ("gelu_pytorch_tanh", "gelu_new") if self.activation == "gelu_tanh" else ()
        if other not in (None, self.hidden_act, *tanh):
            raise ConfigError(
                f"config: hidden_activation is {shown(other)}, but hidden_act is "
                f"{self.hidden_act!r}"
            )

    @property
    def activation(self) -> str:
        """As in ModelConfig, but "gelu" in Gemma's first configs means the tanh form."""
        return "gelu_tanh" if self.hidden_act == "gelu" else super().activation


class GemmaBlock(DecoderBlock):
    """A decoder block with Gemma's parts."""

    def __init__(self, config: GemmaConfig, layer_index: int) -> None:
        hidden = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(hidden, config.rms_norm_eps, offset=1.0, casting_mode="gemma")

        super().__init__(
            self_attn=Attention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                bias=config.attention_bias,
                layer_index=layer_index,
            ),
            mlp=GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            input_layernorm=norm(),
            post_attention_layernorm=norm(),
        )


class LigerGemma(DecoderModel):
    """Gemma on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = GemmaConfig
    config: GemmaConfig

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = ScaledEmbedding(
            config.vocab_size,
            config.hidden_size,
            padding_idx=config.pad_token_id,
            scale=config.hidden_size**0.5,
        )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(
            GemmaBlock(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, offset=1.0, casting_mode="gemma"
        )
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(config.hidden_size, config.vocab_size, tied_to=tied_to)
        self.initialize_weights()
