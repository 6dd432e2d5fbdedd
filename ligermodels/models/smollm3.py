"""SmolLM3: Llama in which every fourth layer does not use positions."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.errors import ConfigError
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.family import FamilyModel
from ligermodels.models.llama import LlamaConfig


@dataclass(kw_only=True)
class SmolLM3Config(LlamaConfig):
    """Fields of a SmolLM3 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str | None] = "SmolLM3ForCausalLM"
    null_is_derived: ClassVar[tuple[str, ...]] = ("num_key_value_heads",)
    largest = LlamaConfig.largest | {"no_rope_layer_interval": 2**14}
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

    def uses_positions(self, layer_index: int) -> bool:
        """Return whether rope rotates the queries and keys of a layer."""
        if self.no_rope_layers is None:
            return (layer_index + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer_index])

    def validate(self) -> None:
        """Check every field as `ModelConfig` does, and the length of no_rope_layers."""
        given, layers = self.no_rope_layers, self.num_hidden_layers
        if isinstance(given, list) and len(given) < layers:
            raise ConfigError(
                f"config: no_rope_layers has {len(given)} entries, expected {layers}: one a layer"
            )
        super().validate()

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: those without positions do, if there is one."""
        return self.window is not None and not self.uses_positions(layer_index)


SmolLM3Config.presets = {
    "smollm3-3b": sizes(2048, 11008, 36, 16, 4)
    | {"rope_theta": 5e6, "max_position_embeddings": 65536}
}


@register
class LigerSmolLM3(FamilyModel):
    """The SmolLM3 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = SmolLM3Config
    config: SmolLM3Config

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        config = self.config
        rotated = config.head_dim if config.uses_positions(layer_index) else 0
        return self.block_of(self.attention_of(layer_index, rotary_dim=rotated), self.mlp_of())
