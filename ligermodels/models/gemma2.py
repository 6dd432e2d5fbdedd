"""Gemma 2: soft caps on scores and logits, norms around each sub-layer, alternating windows."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import (
    Attention,
    GatedMLP,
    LossHead,
    RMSNorm,
    RotaryEmbedding,
    SandwichBlock,
    ScaledEmbedding,
)
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig, windows_from_types
from ligermodels.models.presets import GEMMA2


@dataclass(kw_only=True)
class Gemma2Config(ModelConfig):
    """Fields of a Gemma 2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma2"
    activation_field: ClassVar[str] = "hidden_activation"
    presets: ClassVar[dict[str, dict[str, Any]]] = GEMMA2

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
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None  # None: every second layer slides, the first one first

    @property
    def sliding_windows(self) -> list[int | None]:
        """The window of the sliding layers, None for the others."""
        pattern = ["sliding_attention", "full_attention"] * self.num_hidden_layers
        types = self.layer_types or pattern[: self.num_hidden_layers]
        return windows_from_types(types, self.sliding_window)


class Gemma2Block(SandwichBlock):
    """A decoder block with Gemma 2's parts."""

    def __init__(self, config: Gemma2Config, layer_index: int) -> None:
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
                scale=config.query_pre_attn_scalar**-0.5,
                sliding_window=config.sliding_windows[layer_index],
                softcap=config.attn_logit_softcapping,
                layer_index=layer_index,
            ),
            mlp=GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            input_layernorm=norm(),
            post_attention_layernorm=norm(),
            pre_feedforward_layernorm=norm(),
            post_feedforward_layernorm=norm(),
        )


class LigerGemma2(DecoderModel):
    """Gemma 2 on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = Gemma2Config
    config: Gemma2Config

    def __init__(self, config: Gemma2Config) -> None:
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
            Gemma2Block(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, offset=1.0, casting_mode="gemma"
        )
        self.head = LossHead(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.embed_tokens if config.tie_word_embeddings else None,
            softcap=config.final_logit_softcapping,
        )
        self.initialize_weights()
