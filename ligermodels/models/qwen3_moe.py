"""Qwen3-MoE: Qwen3 with experts in the place of the MLP, in every layer or in some of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import Entry, WeightMap
from ligermodels.layers import DecoderBlock, Experts, GatedMLP, RMSNorm, Router
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderModel, attention_of
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.decoder_weight_map import (
    decoder_weight_map,
    experts_entries,
    fused_experts_entries,
    mlp_entries,
)
from ligermodels.models.experts import ExpertsConfig


@dataclass(kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    """Fields of a Qwen3-MoE `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen3_moe"
    experts_field: ClassVar[str] = "num_experts"
    key_aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    largest: ClassVar[dict[str, int]] = ModelConfig.largest | {
        "num_experts": 2**14,
        "num_experts_per_tok": 2**14,
        "moe_intermediate_size": 2**22,
        "decoder_sparse_step": 2**14,
    }
    small_fields: ClassVar[dict[str, Any]] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "router_aux_loss_coef": 0.5,
        "sliding_window": 7,
    }

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144  # of the layers without experts
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    hidden_act: str = "silu"
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # has no effect unless use_sliding_window
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1  # every so many layers one has experts,
    mlp_only_layers: list[int] | None = None  # but none of these

    @property
    def sliding_windows(self) -> list[int | None]:
        """The same window for every layer."""
        return [self.sliding_window if self.use_sliding_window else None] * self.num_hidden_layers

    def has_experts(self, layer_index: int) -> bool:
        """Return whether a layer has experts in the place of an MLP."""
        if layer_index in (self.mlp_only_layers or ()):
            return False
        return (layer_index + 1) % self.decoder_sparse_step == 0


_QWEN3_MOE = {
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

Qwen3MoeConfig.presets = {
    "qwen3-30b-a3b": _QWEN3_MOE | sizes(2048, 6144, 48, 32, 4, head_dim=128),
    "qwen3-235b-a22b": _QWEN3_MOE
    | sizes(4096, 12288, 94, 64, 4, head_dim=128, moe_intermediate_size=1536),
}


def weight_map(config: Qwen3MoeConfig) -> WeightMap:
    """Return the map from parameters to the tensors of a Qwen3-MoE checkpoint.

    transformers 5 can also save all experts in one tensor, with its `save_original_format=False`.
    """
    count, inner = config.num_experts, config.moe_intermediate_size

    def mlp(index: int, name: str, hf: str) -> Iterable[Entry]:
        if config.has_experts(index):
            return experts_entries(config, name, hf, count=count, inner=inner)
        return mlp_entries(config, name, hf)

    def fused(index: int, name: str, hf: str) -> Iterable[Entry]:
        return (
            fused_experts_entries(config, name, hf, count=count, inner=inner)
            if config.has_experts(index)
            else ()
        )

    bias = config.attention_bias
    return decoder_weight_map(
        config, qkv_bias=bias, out_bias=bias, head_norms=True, mlp=mlp, mlp_layouts={"fused": fused}
    )


@register
class LigerQwen3Moe(DecoderModel):
    """The Qwen3-MoE model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3MoeConfig
    config: Qwen3MoeConfig
    weight_map = staticmethod(weight_map)

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.router_losses = config.router_losses

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        mlp: GatedMLP | Experts
        if config.has_experts(layer_index):
            router = Router(
                hidden,
                config.num_experts,
                config.num_experts_per_tok,
                normalize=config.norm_topk_prob,
            )
            mlp = Experts(router, hidden, config.moe_intermediate_size, config.activation)
        else:
            mlp = GatedMLP(hidden, config.intermediate_size, activation=config.activation)
        return DecoderBlock(
            attention_of(
                config,
                layer_index,
                bias=config.attention_bias,
                q_norm=RMSNorm(config.head_dim, config.rms_norm_eps),
                k_norm=RMSNorm(config.head_dim, config.rms_norm_eps),
            ),
            mlp,
            RMSNorm(hidden, config.rms_norm_eps),
            RMSNorm(hidden, config.rms_norm_eps),
        )
