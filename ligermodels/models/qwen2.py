"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optional windows in later layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class Qwen2Config(ModelConfig):
    """Fields of a Qwen2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen2"
    small_fields: ClassVar[dict[str, Any]] = {"sliding_window": 7, "max_window_layers": 1}
    null_is_derived: ClassVar[tuple[str, ...]] = ("num_key_value_heads",)

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # has no effect unless use_sliding_window
    max_window_layers: int = 28  # this many first layers have no window
    layer_types: list[str] | None = None  # overrides max_window_layers

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: later ones do, if there is one."""
        return self.window is not None and layer_index >= self.max_window_layers


_QWEN2 = {
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
_QWEN2_LARGE = _QWEN2 | {"vocab_size": 152064}
_QWEN2_WIDE = _QWEN2_LARGE | {"rms_norm_eps": 1e-5}
_TIED = {"tie_word_embeddings": True}
_SHORT = {"max_position_embeddings": 32768}
_QWEN_05B = sizes(896, 4864, 24, 14, 2)
_QWEN_15B = sizes(1536, 8960, 28, 12, 2)
_QWEN_7B = sizes(3584, 18944, 28, 28, 4)
_QWEN_72B = sizes(8192, 29568, 80, 64, 8)

Qwen2Config.presets = {
    "qwen2-0.5b": _QWEN2 | _QWEN_05B | _TIED,
    "qwen2-1.5b": _QWEN2 | _QWEN_15B | _TIED,
    "qwen2-7b": _QWEN2_LARGE | _QWEN_7B,
    "qwen2-72b": _QWEN2_WIDE | _QWEN_72B,
    "qwen2.5-0.5b": _QWEN2 | _QWEN_05B | _TIED | _SHORT,
    "qwen2.5-1.5b": _QWEN2 | _QWEN_15B | _TIED,
    "qwen2.5-3b": _QWEN2 | sizes(2048, 11008, 36, 16, 2) | _TIED | _SHORT,
    "qwen2.5-7b": _QWEN2_LARGE | _QWEN_7B,
    "qwen2.5-14b": _QWEN2_WIDE | sizes(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _QWEN2_WIDE | sizes(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _QWEN2_WIDE | _QWEN_72B,
}


@register
class LigerQwen2(FamilyModel):
    """The Qwen2 or Qwen2.5 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen2Config
    config: Qwen2Config

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(
            self.attention_of(layer_index, bias=True, out_bias=False), self.mlp_of()
        )
