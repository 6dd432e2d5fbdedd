"""Qwen3-MoE: Qwen3 with experts in the place of the MLP, in every layer or in some of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.layers import Experts, GatedMLP, Router
from ligermodels.models.auto import register
from ligermodels.models.config import sizes
from ligermodels.models.experts import ExpertsConfig
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    """Fields of a Qwen3-MoE `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen3_moe"
    experts_field: ClassVar[str] = "num_experts"
    key_aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    largest = ExpertsConfig.largest | {"decoder_sparse_step": 2**14}
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


@register
class LigerQwen3Moe(FamilyModel):
    """The Qwen3-MoE model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Qwen3MoeConfig
    config: Qwen3MoeConfig
    hf_names: ClassVar[dict[str, str]] = {"mlp.router": "mlp.gate"}

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        config, hidden = self.config, self.config.hidden_size
        mlp: GatedMLP | Experts
        if config.has_experts(layer_index):
            count, top_k = config.num_experts, config.num_experts_per_tok
            router = Router(hidden, count, top_k, normalize=config.norm_topk_prob)
            mlp = Experts(router, hidden, config.moe_intermediate_size, config.activation)
        else:
            mlp = self.mlp_of()
        return self.block_of(self.attention_of(layer_index, head_norms=True), mlp)
