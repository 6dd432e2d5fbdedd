"""Mixtral: Mistral with experts in the place of the MLP."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import Entry, WeightMap
from ligermodels.layers import DecoderBlock, Experts, RMSNorm, Router
from ligermodels.models.auto import register
from ligermodels.models.base import DecoderModel, attention_of
from ligermodels.models.config import sizes
from ligermodels.models.decoder_weight_map import (
    decoder_weight_map,
    experts_entries,
    fused_experts_entries,
)
from ligermodels.models.experts import ExpertsConfig


@dataclass(kw_only=True)
class MixtralConfig(ExpertsConfig):
    """Fields of a Mixtral `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "mixtral"
    # Training would multiply the input of the experts by noise.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"router_jitter_noise": (0,)}

    intermediate_size: int = 14336  # of each expert
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    sliding_window: int | None = None
    num_local_experts: int = 8

    @property
    def sliding_windows(self) -> list[int | None]:
        """The same window for every layer."""
        return [self.sliding_window] * self.num_hidden_layers


MixtralConfig.presets = {
    "mixtral-8x7b-v0.1": {"max_position_embeddings": 32768},
    "mixtral-8x22b-v0.1": sizes(6144, 16384, 56, 48, 8, max_position_embeddings=65536),
}


def weight_map(config: MixtralConfig) -> WeightMap:
    """Return the map from parameters to the tensors of a Mixtral checkpoint.

    transformers 5 can also save all experts in one tensor, with its `save_original_format=False`.
    """
    count, inner = config.num_local_experts, config.intermediate_size

    def experts(index: int, name: str, hf: str) -> Iterable[Entry]:
        return experts_entries(
            config,
            name,
            f"{hf.removesuffix('mlp')}block_sparse_moe",
            count=count,
            inner=inner,
            projections=("w1", "w3", "w2"),
        )

    def fused(index: int, name: str, hf: str) -> Iterable[Entry]:
        return fused_experts_entries(config, name, hf, count=count, inner=inner)

    return decoder_weight_map(config, mlp=experts, mlp_layouts={"fused": fused})


@register
class LigerMixtral(DecoderModel):
    """The Mixtral model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = MixtralConfig
    config: MixtralConfig
    weight_map = staticmethod(weight_map)

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.router_losses = config.router_losses

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + experts(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        top_k = config.num_experts_per_tok
        router = Router(hidden, config.num_local_experts, top_k, normalize=True)
        return DecoderBlock(
            attention_of(config, layer_index),
            Experts(router, hidden, config.intermediate_size, config.activation),
            RMSNorm(hidden, config.rms_norm_eps),
            RMSNorm(hidden, config.rms_norm_eps),
        )
