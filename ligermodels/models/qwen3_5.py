"""Qwen3.5, dense models: in most layers a gated delta net in the place of attention.

Qwen3.6 and Qwen3.8 have the same architecture.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import Towers
from ligermodels.errors import ConfigError
from ligermodels.layers import GatedMLP, LinearAttention, LinearBlock, SharedExperts
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel

_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(kw_only=True)
class HybridConfig(ModelConfig):
    """The fields that Qwen3.5's dense models share with those that have experts."""

    keeps_wrapper: ClassVar[bool] = True
    layer_type_names: ClassVar[tuple[str, ...]] = (_LINEAR, _FULL)
    unread_rope_keys: ClassVar[tuple[str, ...]] = ("mrope_section", "mrope_interleaved")
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"attn_output_gate": (True,)}
    # The gated delta net has the same one after its convolution, and computes no other.
    activations: ClassVar[dict[str, str]] = {"silu": "silu", "swish": "silu"}
    largest: ClassVar[dict[str, int]] = ModelConfig.largest | {
        "full_attention_interval": 2**14,
        "linear_conv_kernel_dim": 2**8,
        "linear_key_head_dim": 2**16,
        "linear_value_head_dim": 2**16,
        "linear_num_key_heads": 2**16,
        "linear_num_value_heads": 2**16,
    }
    small_fields: ClassVar[dict[str, Any]] = {
        "full_attention_interval": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }

    vocab_size: int = 248320
    num_attention_heads: int = 16
    head_dim: int = 256
    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    hidden_act: str = "silu"
    attention_bias: bool = False
    layer_types: list[str] | None = None  # None: every so many layers one has full attention
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def validate(self) -> None:
        """Check every field, as in `ModelConfig`, and the heads of the gated delta nets."""
        super().validate()
        key_heads, heads = self.linear_num_key_heads, self.linear_num_value_heads
        if heads % key_heads:
            raise ConfigError(
                f"config: linear_num_value_heads is {heads}; expected a multiple of "
                f"linear_num_key_heads {key_heads}"
            )

    @property
    def types(self) -> list[str]:
        """For each layer, whether its mixer is "linear_attention" or "full_attention"."""
        every, count = self.full_attention_interval, self.num_hidden_layers
        return self.layer_types or [_LINEAR if (i + 1) % every else _FULL for i in range(count)]

    @property
    def cache_widths(self) -> list[int]:
        """The size of the keys of a token in each layer's cache: none in a gated delta net."""
        width = self.num_key_value_heads * self.head_dim
        return [width if kind == _FULL else 0 for kind in self.types]


@dataclass(kw_only=True)
class Qwen3_5Config(HybridConfig):
    """Fields of a Qwen3.5 text `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen3_5_text"
    wrapper_type: ClassVar[str | None] = "qwen3_5"
    architecture: ClassVar[str | None] = "Qwen3_5ForCausalLM"

    intermediate_size: int = 12288
    num_key_value_heads: int = 4


QWEN3_5 = {"rope_theta": 1e7, "max_position_embeddings": 262144, "eos_token_id": 248044}

Qwen3_5Config.presets = {
    "qwen3.5-0.8b": QWEN3_5
    | sizes(1024, 3584, 24, 8, 2, linear_num_value_heads=16, tie_word_embeddings=True),
    "qwen3.5-2b": QWEN3_5
    | sizes(2048, 6144, 24, 8, 2, linear_num_value_heads=16, tie_word_embeddings=True),
    "qwen3.5-4b": QWEN3_5 | sizes(2560, 9216, 32, 16, 4, tie_word_embeddings=True),
    "qwen3.5-9b": QWEN3_5 | sizes(4096, 12288, 32, 16, 4),
    "qwen3.5-27b": QWEN3_5 | sizes(5120, 17408, 64, 24, 4, linear_num_value_heads=48),
}


class HybridModel(FamilyModel):
    """A decoder of both kinds of layers."""

    config: Any
    norm_options: ClassVar[dict[str, Any]] = {"offset": 1.0, "casting_mode": "gemma"}
    # Published checkpoints also have a vision tower and layers for a second token.
    towers = Towers((("model.language_model.", "model."),), kept=("model.visual.", "mtp."))

    def make_mlp(self) -> GatedMLP | SharedExperts:
        """Return the MLP of a layer, or what stands in its place."""
        return self.mlp_of()

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + mixer(norm(x)), then h + mlp(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        mlp = self.make_mlp()
        if config.types[layer_index] == _LINEAR:
            mixer = LinearAttention(
                hidden,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
                taps=config.linear_conv_kernel_dim,
                eps=config.rms_norm_eps,
                layer_index=layer_index,
            )
            return LinearBlock(mixer, mlp, self.norm_of(), self.norm_of())
        options: Any = {"rotary_dim": config.rotary_dim, "output_gate": True}
        return self.block_of(self.attention_of(layer_index, head_norms=True, **options), mlp)


@register
class LigerQwen3_5(HybridModel):
    """The text model of Qwen3.5, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3_5Config
    config: Qwen3_5Config
