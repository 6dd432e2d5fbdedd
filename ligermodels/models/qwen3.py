"""Qwen3, the dense models: norms on q and k of each head, and no biases unless asked."""

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
from ligermodels.models.presets import QWEN3
from ligermodels.models.qwen2 import Qwen2Config


@dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen2's fields, with a head_dim of its own and biases if asked."""

    model_type: ClassVar[str] = "qwen3"
    presets: ClassVar[dict[str, dict[str, Any]]] = QWEN3

    head_dim: int = 128
    attention_bias: bool = False


class Qwen3Block(DecoderBlock):
    """A decoder block with Qwen3's parts."""

    def __init__(self, config: Qwen3Config, layer_index: int) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            self_attn=Attention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                bias=config.attention_bias,
                sliding_window=config.sliding_windows[layer_index],
                q_norm=RMSNorm(config.head_dim, eps),
                k_norm=RMSNorm(config.head_dim, eps),
                layer_index=layer_index,
            ),
            mlp=GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            input_layernorm=RMSNorm(hidden, eps),
            post_attention_layernorm=RMSNorm(hidden, eps),
        )


class LigerQwen3(DecoderModel):
    """Qwen3 on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = Qwen3Config
    config: Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(
            Qwen3Block(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(config.hidden_size, config.vocab_size, tied_to=tied_to)
        self.initialize_weights()
