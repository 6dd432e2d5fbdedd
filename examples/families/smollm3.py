"""SmolLM3: Llama in which every fourth layer does not use positions."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

import ligermodels as lm
from ligermodels.layers import Attention, DecoderBlock, GatedMLP, RMSNorm


@dataclass(kw_only=True)
class SmolLM3Config(lm.LlamaConfig):
    """Fields of a SmolLM3 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str | None] = "SmolLM3ForCausalLM"
    largest = lm.LlamaConfig.largest | {"no_rope_layer_interval": 2**14}
    small_fields: ClassVar[dict[str, Any]] = {"sliding_window": 7, "no_rope_layer_interval": 2}

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    rope_theta: float = 2e6
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 128004
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    no_rope_layers: list[int] | None = None  # 1 for each layer with positions, 0 for each without
    no_rope_layer_interval: int = 4  # used if no_rope_layers is None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None  # None: the layers without positions slide

    def uses_positions(self, layer: int) -> bool:
        """Return whether rope rotates the queries and keys of a layer."""
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer])

    def validate(self) -> None:
        """Check every field as `ModelConfig` does, and the length of no_rope_layers."""
        super().validate()
        given, layers = self.no_rope_layers, self.num_hidden_layers
        if given is not None and len(given) != layers:
            raise lm.ConfigError(
                f"config: no_rope_layers has {len(given)} entries, expected {layers}: one a layer"
            )

    @property
    def sliding_windows(self) -> list[int | None]:
        """The window of each sliding layer, and None for each other layer."""
        window = self.sliding_window if self.use_sliding_window else None
        layers = range(self.num_hidden_layers)
        slides = [not self.uses_positions(i) for i in layers]
        if self.layer_types is not None:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        return [window if each else None for each in slides]


@lm.register
class LigerSmolLM3(lm.LigerLlama):
    """The SmolLM3 model, built from fused layers."""

    config_class = SmolLM3Config
    config: SmolLM3Config

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a block of Llama, whose layer may ignore positions, and may have a window."""
        config, hidden, eps = self.config, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(
            *(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            bias=config.attention_bias,
            sliding_window=config.sliding_windows[layer_index],
            rotary_dim=config.head_dim if config.uses_positions(layer_index) else 0,
            layer_index=layer_index,
        )
        inner, bias = config.intermediate_size, config.mlp_bias
        mlp = GatedMLP(hidden, inner, bias=bias, activation=config.activation)
        return DecoderBlock(attention, mlp, RMSNorm(hidden, eps), RMSNorm(hidden, eps))
