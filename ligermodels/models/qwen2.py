"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows in the later layers if asked."""

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
from ligermodels.models.config import ModelConfig, windows_from_types
from ligermodels.models.presets import QWEN2


@dataclass(kw_only=True)
class Qwen2Config(ModelConfig):
    """Fields of a Qwen2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen2"
    presets: ClassVar[dict[str, dict[str, Any]]] = QWEN2
    null_is_derived: ClassVar[tuple[str, ...]] = ("num_key_value_heads",)

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # without effect unless use_sliding_window
    max_window_layers: int = 28  # how many layers from the first on do not slide
    layer_types: list[str] | None = None  # wins over max_window_layers

    @property
    def sliding_windows(self) -> list[int | None]:
        """The window of the sliding layers, None for the others."""
        window = self.sliding_window if self.use_sliding_window else None
        types = self.layer_types or [
            "sliding_attention"
            if window is not None and index >= self.max_window_layers
            else "full_attention"
            for index in range(self.num_hidden_layers)
        ]
        return windows_from_types(types, window)


class Qwen2Block(DecoderBlock):
    """A decoder block with Qwen2's parts."""

    def __init__(self, config: Qwen2Config, layer_index: int) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            self_attn=Attention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                bias=True,
                out_bias=False,
                sliding_window=config.sliding_windows[layer_index],
                layer_index=layer_index,
            ),
            mlp=GatedMLP(hidden, config.intermediate_size, activation=config.activation),
            input_layernorm=RMSNorm(hidden, eps),
            post_attention_layernorm=RMSNorm(hidden, eps),
        )


class LigerQwen2(DecoderModel):
    """Qwen2 and Qwen2.5 on fused layers.

    `model(input_ids)` gives hidden states, `model(input_ids, labels=labels)` the head's output.
    """

    config_class = Qwen2Config
    config: Qwen2Config

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.rotary_emb = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(
            Qwen2Block(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(config.hidden_size, config.vocab_size, tied_to=tied_to)
        self.initialize_weights()
