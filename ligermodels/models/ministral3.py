"""Ministral 3: Llama with yarn, and queries that grow with the logarithm of their position."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import Towers
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel
from ligermodels.models.module_map import TEXT_NAMES, VISION_NAMES

_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(kw_only=True)
class Ministral3Config(ModelConfig):
    """Fields of a Ministral 3 text `config.json`, under HF's names and with HF's defaults.

    `rope_scaling["llama_4_scaling_beta"]` is beta in the factor of rotated queries, 1 + beta *
    ln(1 + floor(position / original_max_position_embeddings)).
    """

    model_type: ClassVar[str] = "ministral3"
    wrapper_type: ClassVar[str | None] = "mistral3"
    keeps_wrapper: ClassVar[bool] = True
    default_rope: ClassVar[dict[str, Any]] = _YARN | {"rope_theta": 1e6}
    # `RotaryEmbedding` reads the second one, which other families do not have.
    unread_rope_keys: ClassVar[tuple[str, ...]] = (
        *ModelConfig.unread_rope_keys,
        *("max_position_embeddings", "llama_4_scaling_beta"),
    )
    small_fields: ClassVar[dict[str, Any]] = {
        "rope_scaling": _YARN | {"original_max_position_embeddings": 8},
        "sliding_window": 7,
    }

    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_scaling: dict[str, Any] | None = field(default_factory=lambda: dict(_YARN))
    pad_token_id: int | None = 11
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    sliding_window: int | None = None


Ministral3Config.presets = {
    "ministral-3-3b": sizes(3072, 9216, 26, 32, 8, tie_word_embeddings=True),
    "ministral-3-8b": sizes(4096, 14336, 34, 32, 8),
}


@register
class LigerMinistral3(FamilyModel):
    """The text model of Ministral 3, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Ministral3Config
    config: Ministral3Config
    towers = Towers(TEXT_NAMES, kept=VISION_NAMES)

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(self.attention_of(layer_index), self.mlp_of())
