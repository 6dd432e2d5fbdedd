"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, and windows in every second layer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import (
    MXFP4_BLOCKS,
    Entry,
    WeightMap,
    expert_entry,
    linear_entries,
    packed_entry,
)
from ligermodels.layers import ClampedSwiGLU, DecoderBlock, Experts, RMSNorm, Router
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderModel, attention_of
from ligermodels.models.config import sizes, windows_from_types
from ligermodels.models.decoder_weight_map import attention_entries, decoder_weight_map
from ligermodels.models.experts import ExpertsConfig

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

    @property
    def sliding_windows(self) -> list[int | None]:
        """The window of each sliding layer, and None for each other layer."""
        pattern = ["sliding_attention", "full_attention"] * self.num_hidden_layers
        types = self.layer_types or pattern[: self.num_hidden_layers]
        return windows_from_types(types, self.sliding_window)


_GPT_OSS = {"pad_token_id": 199999, "eos_token_id": 200002}

GptOssConfig.presets = {
    "gpt-oss-20b": _GPT_OSS | sizes(2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _GPT_OSS | sizes(2880, 2880, 36, 64, 8, num_local_experts=128),
}


def weight_map(config: GptOssConfig) -> WeightMap:
    """Return the map from parameters to the tensors of a gpt-oss checkpoint, in bfloat16 or MXFP4.

    The weights of all experts are one tensor, (experts, in, out), where the columns of gate and up
    alternate. In MXFP4 it is (experts, out, in).
    """
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_local_experts
    bias = config.attention_bias

    def attention(index: int, name: str, hf: str) -> Iterator[Entry]:
        yield from attention_entries(config, name, hf, qkv_bias=bias, out_bias=bias)
        yield packed_entry(f"{name}.sinks", (), (f"{hf}.sinks", config.num_attention_heads))

    def experts(mxfp4: bool, index: int, name: str, hf: str) -> Iterator[Entry]:
        yield from linear_entries(f"{name}.router", hidden, (f"{hf}.router", count), bias=True)
        sides = ("gate_up", hidden, 2 * inner, 2), ("down", inner, hidden, 1)
        for one, width, rows, parts in sides:
            source = f"{hf}.experts.{one}_proj"
            yield expert_entry(
                f"{name}.{one}_proj",
                (width,),
                source + MXFP4_BLOCKS if mxfp4 else source,
                count,
                rows,
                parts=parts,
                transposed=not mxfp4,
            )
            yield expert_entry(f"{name}.{one}_bias", (), f"{source}_bias", count, rows, parts=parts)

    return decoder_weight_map(
        config,
        attention=attention,
        mlp=partial(experts, False),
        mlp_layouts={"mxfp4": partial(experts, True)},
    )


@register
class LigerGptOss(DecoderModel):
    """The gpt-oss model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = GptOssConfig
    config: GptOssConfig
    weight_map = staticmethod(weight_map)

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__(config)
        self.build(norm=self._norm())
        self.router_losses = config.router_losses

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, casting_mode="gemma")

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + experts(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        # The softmax over the chosen logits is that over all, divided by its sum over the chosen.
        router = Router(
            hidden, config.num_local_experts, config.num_experts_per_tok, bias=True, normalize=True
        )
        activation = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
        return DecoderBlock(
            attention_of(config, layer_index, bias=config.attention_bias, sinks=True),
            Experts(router, hidden, config.intermediate_size, activation, bias=True),
            self._norm(),
            self._norm(),
        )
