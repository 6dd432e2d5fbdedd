"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, and windows in every second layer."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import ClampedSwiGLU, Experts, Router
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.experts import ExpertsConfig
from ligermodels.models.family import FamilyModel
from ligermodels.models.module_map import ALTERNATING, MXFP4

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(kw_only=True)
class GptOssConfig(ExpertsConfig):
    """Fields of a gpt-oss `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "gpt_oss"
    key_aliases: ClassVar[dict[str, str]] = {
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }
    quantizations: ClassVar[tuple[str, ...]] = ("mxfp4",)
    default_rope: ClassVar[dict[str, Any]] = _YARN
    positive = (*ExpertsConfig.positive, "swiglu_alpha", "swiglu_limit")
    small_fields: ClassVar[dict[str, Any]] = ExpertsConfig.small_fields | {
        "sliding_window": 7,
        "swiglu_limit": 0.5,
    }

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880  # of one expert
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: dict[str, Any] | None = field(default_factory=lambda: dict(_YARN))
    hidden_act: str = "silu"  # has no effect
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: list[str] | None = None  # None: layers 0, 2, 4, ... have the window
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @property
    def activation(self) -> str:
        """That of the experts, whatever hidden_act is."""
        return "clamped SwiGLU"

    def slides(self, layer_index: int) -> bool:
        """Return whether a layer has the window: layers 0, 2, 4, ... do."""
        return layer_index % 2 == 0


_GPT_OSS = {"pad_token_id": 199999, "eos_token_id": 200002}

GptOssConfig.presets = {
    "gpt-oss-20b": _GPT_OSS | sizes(2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _GPT_OSS | sizes(2880, 2880, 36, 64, 8, num_local_experts=128),
}


@register
class LigerGptOss(FamilyModel):
    """The gpt-oss model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = GptOssConfig
    config: GptOssConfig
    norm_options: ClassVar[dict[str, Any]] = {"casting_mode": "gemma"}  # one rounding, at the end
    # All experts are one tensor, (experts, in, out), or in MXFP4 (experts, out, in).
    expert_layouts: ClassVar[dict[str, dict[str, str]]] = {ALTERNATING: {}, MXFP4: {}}

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + experts(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        # The softmax over the chosen logits is that over all, divided by its sum over the chosen.
        router = Router(
            hidden, config.num_local_experts, config.num_experts_per_tok, bias=True, normalize=True
        )
        activation = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
        return self.block_of(
            self.attention_of(layer_index, sinks=True),
            Experts(router, hidden, config.intermediate_size, activation, bias=True),
        )
