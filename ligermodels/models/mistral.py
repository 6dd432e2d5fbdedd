"""Mistral: Llama with grouped heads. Its first version also has a sliding window."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class MistralConfig(ModelConfig):
    """Fields of a Mistral `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "mistral"
    small_fields: ClassVar[dict[str, Any]] = {"sliding_window": 7}
    # Programs differ in the window that they assume if this field is missing.
    written: ClassVar[tuple[str, ...]] = ("sliding_window",)

    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    sliding_window: int | None = 4096


_MISTRAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
_MISTRAL_FULL = _MISTRAL | {"sliding_window": None, "rope_theta": 1e6}

MistralConfig.presets = {
    "mistral-7b-v0.1": _MISTRAL,
    "mistral-7b-v0.2": _MISTRAL_FULL,
    "mistral-7b-v0.3": _MISTRAL_FULL | {"vocab_size": 32768},
    "mistral-nemo-12b": _MISTRAL_FULL
    | sizes(5120, 14336, 40, 32, 8, head_dim=128, vocab_size=131072)
    | {"max_position_embeddings": 131072},
    "mistral-small-22b": _MISTRAL_FULL
    | sizes(6144, 16384, 56, 48, 8, head_dim=128, vocab_size=32768),
    "mistral-small-24b": _MISTRAL_FULL
    | sizes(5120, 32768, 40, 32, 8, head_dim=128, vocab_size=131072)
    | {"rope_theta": 1e8},
}


@register
class LigerMistral(FamilyModel):
    """The Mistral model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = MistralConfig
    config: MistralConfig

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(self.attention_of(layer_index), self.mlp_of())
