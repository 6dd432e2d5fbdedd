"""Gemma 3's text model: q and k norms, five sliding layers with a rope of their own to one full."""

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
from ligermodels.models.presets import GEMMA3


@dataclass(kw_only=True)
class Gemma3Config(ModelConfig):
    """Fields of a Gemma 3 text `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma3_text"
    activation_field: ClassVar[str] = "hidden_activation"
    wrapper_type: ClassVar[str | None] = "gemma3"
    presets: ClassVar[dict[str, dict[str, Any]]] = GEMMA3

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131072
    rope_theta: float = 1e6  # of the full layers, and so is rope_scaling
    rope_local_base_freq: float = 1e4  # theta of the sliding layers
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None  # None: every sliding_window_pattern-th layer is full

    @property
    def sliding_windows(self) -> list[int | None]:
        """The window of the sliding layers, None for the others."""
        types = self.layer_types or [
            "sliding_attention" if (index + 1) % self.sliding_window_pattern else "full_attention"
            for index in range(self.num_hidden_layers)
        ]
        return windows_from_types(types, self.sliding_window)


class Gemma3Block(SandwichBlock):
    """A decoder block with Gemma 3's parts."""

    def __init__(self, config: Gemma3Config, layer_index: int) -> None:
        hidden = config.hidden_size

        def norm(size: int = hidden) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, offset=1.0, casting_mode="gemma")

        super().__init__(
            self_attn=Attention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                bias=config.attention_bias,
                scale=config.query_pre_attn_scalar**-0.5,
                sliding_window=config.sliding_windows[layer_index],
                q_norm=norm(config.head_dim),
                k_norm=norm(config.head_dim),
                layer_index=layer_index,
            ),
            mlp=GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            input_layernorm=norm(),
            post_attention_layernorm=norm(),
            pre_feedforward_layernorm=norm(),
            post_feedforward_layernorm=norm(),
        )


class LigerGemma3(DecoderModel):
    """Gemma 3's text model on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = Gemma3Config
    config: Gemma3Config

    def __init__(self, config: Gemma3Config) -> None:
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
        self.rotary_emb_local = RotaryEmbedding(
            config.head_dim, config.rope_local_base_freq, config.max_position_embeddings
        )
        self.layers = nn.ModuleList(
            Gemma3Block(config, index) for index in range(config.num_hidden_layers)
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

    @property
    def ropes(self) -> list[str]:
        """Sliding layers have a rope of their own, which knows nothing of longer contexts."""
        windows = self.built_from.sliding_windows
        return ["rotary_emb" if window is None else "rotary_emb_local" for window in windows]
