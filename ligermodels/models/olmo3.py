"""OLMo 3: OLMo 2 with windows in three of four layers, whose rope stays plain when it is scaled."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.olmo2 import LigerOlmo2, Olmo2Config


@dataclass(kw_only=True)
class Olmo3Config(Olmo2Config):
    """The fields of OLMo 2, and the types of the layers."""

    model_type: ClassVar[str] = "olmo3"
    positive = (*Olmo2Config.positive, "rope_local_base_freq")
    small_fields: ClassVar[dict[str, Any]] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
    }

    rope_theta: float = 500000.0  # theta of the full layers; rope_scaling is also theirs
    rope_local_base_freq: float = 500000.0  # theta of the sliding layers
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None  # None: every fourth layer is full

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: three of four do."""
        return (layer_index + 1) % 4 != 0


_OLMO3 = {
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "pad_token_id": 100277,
    "eos_token_id": 100257,
}

Olmo3Config.presets = {
    "olmo-3-7b": _OLMO3 | sizes(4096, 11008, 32, 32),
    "olmo-3-32b": _OLMO3 | sizes(5120, 27648, 64, 40, 8),
}


@register
class LigerOlmo3(LigerOlmo2):
    """The OLMo 3 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Olmo3Config
    config: Olmo3Config
