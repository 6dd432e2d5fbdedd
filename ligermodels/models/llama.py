"""Llama 1 to 3.3 and everything with its shape (TinyLlama, CodeLlama, SmolLM2)."""

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
from ligermodels.models.presets import LLAMA


@dataclass(kw_only=True)
class LlamaConfig(ModelConfig):
    """Fields of a Llama `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "llama"
    presets: ClassVar[dict[str, dict[str, Any]]] = LLAMA

    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaBlock(DecoderBlock):
    """A decoder block with Llama's parts."""

    def __init__(self, config: LlamaConfig, layer_index: int) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            self_attn=Attention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                bias=config.attention_bias,
                layer_index=layer_index,
            ),
            mlp=GatedMLP(
                hidden,
                config.intermediate_size,
                bias=config.mlp_bias,
                activation=config.activation,
            ),
            input_layernorm=RMSNorm(hidden, eps),
            post_attention_layernorm=RMSNorm(hidden, eps),
        )


class LigerLlama(DecoderModel):
    """Llama on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = LlamaConfig
    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(
            LlamaBlock(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(config.hidden_size, config.vocab_size, tied_to=tied_to)
        self.initialize_weights()
