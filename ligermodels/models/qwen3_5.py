"""Qwen3.5, dense models: in most layers a gated delta net in the place of attention.

Qwen3.6 and Qwen3.8 have the same architecture.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import (
    Entry,
    Towers,
    WeightMap,
    linear_entries,
    norm_entries,
    packed_entry,
)
from ligermodels.errors import ConfigError
from ligermodels.kernels.checks import MAX_DELTA_KEY_DIM
from ligermodels.layers import (
    DecoderBlock,
    GatedMLP,
    LinearAttention,
    LinearBlock,
    RMSNorm,
    SharedExperts,
)
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderModel, attention_of
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.decoder_weight_map import LayerEntries, decoder_weight_map

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
        if self.linear_key_head_dim > MAX_DELTA_KEY_DIM:
            raise ConfigError(
                f"config: linear_key_head_dim is {self.linear_key_head_dim}; expected at most "
                f"{MAX_DELTA_KEY_DIM}, which the kernels take"
            )

    @property
    def kinds(self) -> list[str]:
        """For each layer, whether its mixer is "linear_attention" or "full_attention"."""
        every, count = self.full_attention_interval, self.num_hidden_layers
        return self.layer_types or [_LINEAR if (i + 1) % every else _FULL for i in range(count)]

    @property
    def cache_widths(self) -> list[int]:
        """The size of the keys of a token in each layer's cache: none in a gated delta net."""
        width = self.num_key_value_heads * self.head_dim
        return [width if kind == _FULL else 0 for kind in self.kinds]

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a row's states in all gated delta nets: see `LinearAttention`."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        rows = (self.linear_conv_kernel_dim - 1) * (2 * keys + values)
        return self.kinds.count(_LINEAR) * (itemsize * rows + 4 * values * self.linear_key_head_dim)


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


# Published checkpoints also have a vision tower and layers for a second token, which pass through.
_TOWERS = Towers((("model.language_model.", "model."),), kept=("model.visual.", "mtp."))


def hybrid_weight_map(
    config: HybridConfig,
    mlp: LayerEntries | None = None,
    mlp_layouts: Mapping[str, LayerEntries] | None = None,
) -> WeightMap:
    """Return the map of a checkpoint with both kinds of layers; see `decoder_weight_map`."""
    hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
    q_rows, kv_rows = config.num_attention_heads * head, config.num_key_value_heads * head
    heads, values = config.linear_num_value_heads, config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    channels = 2 * keys + heads * values

    def mixer(index: int, name: str, hf: str) -> Iterator[Entry]:
        if config.kinds[index] == _FULL:
            # A query head in q_proj is followed by its gate.
            qkv = (f"{hf}.q_proj", 2 * q_rows), (f"{hf}.k_proj", kv_rows), (f"{hf}.v_proj", kv_rows)
            yield from linear_entries(f"{name}.qkv_proj", hidden, *qkv, bias=bias)
            for norm in ("q_norm", "k_norm"):
                yield from norm_entries(f"{name}.{norm}", f"{hf}.{norm}", head)
            out = (f"{hf}.o_proj", hidden)
            yield from linear_entries(f"{name}.o_proj", q_rows, out, bias=bias)
            return
        name, hf = (x.replace("self_attn", "linear_attn") for x in (name, hf))
        sizes = {"qkv": channels, "z": heads * values, "b": heads, "a": heads}
        projections = ((f"{hf}.in_proj_{part}", rows) for part, rows in sizes.items())
        yield from linear_entries(f"{name}.in_proj", hidden, *projections)
        taps = (1, config.linear_conv_kernel_dim)
        yield packed_entry(f"{name}.conv1d.weight", taps, (f"{hf}.conv1d.weight", channels))
        yield packed_entry(f"{name}.A_log", (), (f"{hf}.A_log", heads))
        yield packed_entry(f"{name}.dt_bias", (), (f"{hf}.dt_bias", heads))
        yield from norm_entries(f"{name}.norm", f"{hf}.norm", values)
        yield from linear_entries(f"{name}.out_proj", heads * values, (f"{hf}.out_proj", hidden))

    return decoder_weight_map(
        config, attention=mixer, mlp=mlp, mlp_layouts=mlp_layouts, towers=_TOWERS
    )


class HybridModel(DecoderModel):
    """A decoder of both kinds of layers. A family defines `make_mlp`."""

    config: Any

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.build(norm=self.norm_of(config.hidden_size))

    def norm_of(self, size: int) -> RMSNorm:
        """Return a norm whose factor is 1 + weight."""
        return RMSNorm(size, self.config.rms_norm_eps, offset=1.0, casting_mode="gemma")

    def make_mlp(self) -> GatedMLP | SharedExperts:
        """Return the MLP of a layer, or what stands in its place."""
        raise NotImplementedError

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + mixer(norm(x)), then h + mlp(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        mlp, norms = self.make_mlp(), (self.norm_of(hidden), self.norm_of(hidden))
        if config.kinds[layer_index] == _LINEAR:
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
            return LinearBlock(mixer, mlp, *norms)
        head = config.head_dim
        attention = attention_of(
            config,
            layer_index,
            bias=config.attention_bias,
            q_norm=self.norm_of(head),
            k_norm=self.norm_of(head),
            rotary_dim=config.rotary_dim,
            output_gate=True,
        )
        return DecoderBlock(attention, mlp, *norms)


@register
class LigerQwen3_5(HybridModel):
    """The text model of Qwen3.5, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3_5Config
    config: Qwen3_5Config
    weight_map = staticmethod(hybrid_weight_map)

    def make_mlp(self) -> GatedMLP:
        """Return the MLP of a layer."""
        config = self.config
        return GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation)
