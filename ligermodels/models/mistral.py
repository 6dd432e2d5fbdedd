"""Mistral: Llama with grouped heads and, in its first version, a sliding window."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import (
    Attention,
    DecoderBlock,
    GatedMLP,
    LossHead,
    RMSNorm,
    RotaryEmbedding,
)
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.models.presets import MISTRAL


@dataclass(kw_only=True)
class MistralConfig(ModelConfig):
    """Fields of a Mistral `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "mistral"
    presets: ClassVar[dict[str, dict[str, Any]]] = MISTRAL
    # Readers that find no window assume one, or none, each as they like.
    written: ClassVar[tuple[str, ...]] = ("sliding_window",)

    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    sliding_window: int | None = 4096

    @property
    def sliding_windows(self) -> list[int | None]:
        """The one window, in every layer."""
        return [self.sliding_window] * self.num_hidden_layers


class MistralBlock(DecoderBlock):
    """A decoder block with Mistral's parts."""

    def __init__(self, config: MistralConfig, layer_index: int) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            self_attn=Attention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                sliding_window=config.sliding_windows[layer_index],
                layer_index=layer_index,
            ),
            mlp=GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            input_layernorm=RMSNorm(hidden, eps),
            post_attention_layernorm=RMSNorm(hidden, eps),
        )


class LigerMistral(DecoderModel):
    """Mistral on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = MistralConfig
    config: MistralConfig

    def __init__(self, config: MistralConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(
            MistralBlock(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(config.hidden_size, config.vocab_size, tied_to=tied_to)
        self.initialize_weights()
