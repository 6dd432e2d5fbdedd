"""Gemma 3's text model: Gemma 2 with norms on q and k, and without capped scores.

By default one full layer follows five sliding layers, which have a separate rope.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligermodels.converters.weight_map import Towers
from ligermodels.layers import SandwichBlock
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.gemma import GemmaModel
from ligermodels.models.gemma2 import SandwichConfig
from ligermodels.models.module_map import TEXT_NAMES, VISION_NAMES


@dataclass(kw_only=True)
class Gemma3Config(SandwichConfig):
    """Fields of a Gemma 3 text `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gemma3_text"
    wrapper_type: ClassVar[str | None] = "gemma3"
    largest = SandwichConfig.largest | {"sliding_window_pattern": 2**14}
    positive = (*SandwichConfig.positive, "rope_local_base_freq")
    small_fields = SandwichConfig.small_fields | {"sliding_window_pattern": 2}

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float = 1e6  # theta of the full layers; rope_scaling is also theirs
    rope_local_base_freq: float = 1e4  # theta of the sliding layers
    sliding_window_pattern: int = 6  # without layer_types, every so many-th layer is full

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: all but every so many-th one do."""
        return (layer_index + 1) % self.sliding_window_pattern != 0


_GEMMA3_TEXT = {"vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512}
# The text models of the sizes that have a vision tower.
_GEMMA3_TOWER = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}

Gemma3Config.presets = {
    "gemma-3-270m": _GEMMA3_TEXT | sizes(640, 2048, 18, 4, 1),
    "gemma-3-1b": _GEMMA3_TEXT | sizes(1152, 6912, 26, 4, 1),
    "gemma-3-4b": _GEMMA3_TOWER | sizes(2560, 10240, 34, 8, 4),
    "gemma-3-12b": _GEMMA3_TOWER | sizes(3840, 15360, 48, 16, 8),
    "gemma-3-27b": _GEMMA3_TOWER
    | sizes(5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
}


@register
class LigerGemma3(GemmaModel):
    """The text model of Gemma 3, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Gemma3Config
    config: Gemma3Config
    towers = Towers(TEXT_NAMES, left_out=VISION_NAMES)

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h)))."""
        scale = self.config.query_pre_attn_scalar**-0.5
        attention = self.attention_of(layer_index, scale=scale, head_norms=True)
        return SandwichBlock(attention, self.mlp_of(), *(self.norm_of() for _ in range(4)))
