"""Qwen3.5 with experts: in each layer, experts beside an MLP that every token gets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ligermodels.converters.weight_map import Entry, WeightMap, linear_entries
from ligermodels.layers import Experts, GatedMLP, Router, SharedExperts
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.decoder_weight_map import (
    ONE_BY_ONE,
    experts_entries,
    fused_experts_entries,
    mlp_entries,
)
from ligermodels.models.experts import ExpertsConfig
from ligermodels.models.qwen3_5 import QWEN3_5, HybridConfig, HybridModel, hybrid_weight_map


@dataclass(kw_only=True)
class Qwen3_5MoeConfig(HybridConfig, ExpertsConfig):
    """Fields of a Qwen3.5-MoE text `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"
    wrapper_type: ClassVar[str | None] = "qwen3_5_moe"
    architecture: ClassVar[str | None] = "Qwen3_5MoeForCausalLM"
    experts_field: ClassVar[str] = "num_experts"
    key_aliases: ClassVar[dict[str, str]] = {}
    largest: ClassVar[dict[str, int]] = HybridConfig.largest | {
        "num_experts": 2**14,
        "num_experts_per_tok": 2**14,
        "moe_intermediate_size": 2**22,
        "shared_expert_intermediate_size": 2**22,
    }
    small_fields: ClassVar[dict[str, Any]] = HybridConfig.small_fields | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "router_aux_loss_coef": 0.5,
    }

    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512  # of one expert
    shared_expert_intermediate_size: int = 512


Qwen3_5MoeConfig.presets = {"qwen3.5-35b-a3b": QWEN3_5 | sizes(2048, 512, 40, 16, 2)}


def weight_map(config: Qwen3_5MoeConfig) -> WeightMap:
    """Return the map from parameters to the tensors of a Qwen3.5-MoE checkpoint.

    Published checkpoints have all experts in one tensor; transformers saves each one alone.
    """
    hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
    count, inner = config.num_experts, config.moe_intermediate_size

    def mlp(experts: Callable[..., list[Entry]], index: int, name: str, hf: str) -> Iterator[Entry]:
        yield from experts(config, f"{name}.experts", hf, count=count, inner=inner)
        yield from mlp_entries(config, f"{name}.shared", f"{hf}.shared_expert", inner=shared)
        yield from linear_entries(f"{name}.gate", hidden, (f"{hf}.shared_expert_gate", 1))

    layouts = {ONE_BY_ONE: partial(mlp, experts_entries)}
    return hybrid_weight_map(config, partial(mlp, fused_experts_entries), layouts)


@register
class LigerQwen3_5Moe(HybridModel):
    """The text model of Qwen3.5 with experts, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3_5MoeConfig
    config: Qwen3_5MoeConfig
    weight_map = staticmethod(weight_map)

    def __init__(self, config: Qwen3_5MoeConfig) -> None:
        super().__init__(config)
        self.router_losses = config.router_losses

    def make_mlp(self) -> SharedExperts:
        """Return the experts of a layer, and the MLP beside them."""
        config, hidden = self.config, self.config.hidden_size
        router = Router(hidden, config.num_experts, config.num_experts_per_tok, normalize=True)
        experts = Experts(router, hidden, config.moe_intermediate_size, config.activation)
        inner = config.shared_expert_intermediate_size
        shared = GatedMLP(hidden, inner, activation=config.activation)
        return SharedExperts(experts, shared, nn.Linear(hidden, 1, bias=False))
