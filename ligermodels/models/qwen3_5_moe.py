"""Qwen3.5 with experts: in each layer, experts beside an MLP that every token gets."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import Experts, Router, SharedExperts
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.experts import ExpertsConfig
from ligermodels.models.module_map import FUSED, ONE_BY_ONE
from ligermodels.models.qwen3_5 import QWEN3_5, HybridConfig, HybridModel


@dataclass(kw_only=True)
class Qwen3_5MoeConfig(HybridConfig, ExpertsConfig):
    """Fields of a Qwen3.5-MoE text `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen3_5_moe_text"
    wrapper_type: ClassVar[str | None] = "qwen3_5_moe"
    architecture: ClassVar[str | None] = "Qwen3_5MoeForCausalLM"
    experts_field: ClassVar[str] = "num_experts"
    key_aliases: ClassVar[dict[str, str]] = {}
    largest = HybridConfig.largest | ExpertsConfig.largest
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


@register
class LigerQwen3_5Moe(HybridModel):
    """The text model of Qwen3.5 with experts, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3_5MoeConfig
    config: Qwen3_5MoeConfig
    hf_names: ClassVar[dict[str, str]] = {
        "mlp.experts": "mlp",
        "mlp.experts.router": "mlp.gate",
        "mlp.shared": "mlp.shared_expert",
        "mlp.gate": "mlp.shared_expert_gate",
    }
    # Published checkpoints have all experts in one tensor; transformers saves each one alone.
    expert_layouts: ClassVar[dict[str, dict[str, str]]] = {FUSED: {}, ONE_BY_ONE: {}}

    def make_mlp(self) -> SharedExperts:
        """Return the experts of a layer, and the MLP beside them."""
        config, hidden = self.config, self.config.hidden_size
        router = Router(hidden, config.num_experts, config.num_experts_per_tok, normalize=True)
        experts = Experts(router, hidden, config.moe_intermediate_size, config.activation)
        shared = self.mlp_of(config.shared_expert_intermediate_size)
        return SharedExperts(experts, shared, nn.Linear(hidden, 1, bias=False))
