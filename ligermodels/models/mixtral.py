"""Mixtral: Mistral with experts in the place of the MLP."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import Experts, Router
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.experts import ExpertsConfig
from ligermodels.models.family import FamilyModel
from ligermodels.models.module_map import FUSED, ONE_BY_ONE


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


MixtralConfig.presets = {
    "mixtral-8x7b-v0.1": {"max_position_embeddings": 32768},
    "mixtral-8x22b-v0.1": sizes(6144, 16384, 56, 48, 8, max_position_embeddings=65536),
}


@register
class LigerMixtral(FamilyModel):
    """The Mixtral model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = MixtralConfig
    config: MixtralConfig
    # transformers 5 can also save all experts in one tensor, with its `save_original_format=False`.
    expert_layouts: ClassVar[dict[str, dict[str, str]]] = {
        ONE_BY_ONE: {"mlp": "block_sparse_moe", "mlp.router": "block_sparse_moe.gate"},
        FUSED: {"mlp.router": "mlp.gate"},
    }
    expert_projections = ("w1", "w3", "w2")

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + experts(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        top_k = config.num_experts_per_tok
        router = Router(hidden, config.num_local_experts, top_k, normalize=True)
        return self.block_of(
            self.attention_of(layer_index),
            Experts(router, hidden, config.intermediate_size, config.activation),
        )
