"""Qwen3-MoE: Qwen3 with experts instead of one MLP, and a loss that balances them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

import ligermodels as lm
from ligermodels.layers import Experts, Router


@dataclass(kw_only=True)
class Qwen3MoeConfig(lm.Qwen3Config):
    """The fields of Qwen3 and of the experts, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "qwen3_moe"
    key_aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    refused: ClassVar[dict[str, Any]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
    largest = lm.Qwen3Config.largest | {
        "num_experts": 2**14,
        "num_experts_per_tok": 2**14,
        "moe_intermediate_size": 2**22,
    }
    small_fields = lm.Qwen3Config.small_fields | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "router_aux_loss_coef": 0.5,
    }

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    head_dim: int = None  # type: ignore[assignment]  # hidden_size / num_attention_heads
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False  # whether the loss contains the balance of the experts
    router_aux_loss_coef: float = 0.001

    @property
    def sliding_windows(self) -> list[int | None]:
        """The same window for every layer."""
        return [self.sliding_window if self.use_sliding_window else None] * self.num_hidden_layers


def weight_map(config: Qwen3MoeConfig) -> lm.WeightMap:
    """Return the map from parameters to the tensors of a Qwen3-MoE checkpoint."""
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts

    def experts(index: int, name: str, hf: str) -> Iterator[lm.Entry]:
        each = [f"{hf}.experts.{i}" for i in range(count)]
        gate_up = [(f"{expert}.{p}_proj.weight", inner) for expert in each for p in ("gate", "up")]
        down = [(f"{expert}.down_proj.weight", hidden) for expert in each]
        yield from lm.linear_entries(f"{name}.router", hidden, (f"{hf}.gate", count))
        yield lm.packed_entry(f"{name}.gate_up_proj", (hidden,), *gate_up)
        yield lm.packed_entry(f"{name}.down_proj", (inner,), *down)

    bias = config.attention_bias
    return lm.decoder_weight_map(config, qkv_bias=bias, out_bias=bias, head_norms=True, mlp=experts)


@lm.register
class LigerQwen3Moe(lm.LigerQwen3):
    """The Qwen3-MoE model, built from fused layers."""

    config_class = Qwen3MoeConfig
    config: Qwen3MoeConfig
    weight_map = staticmethod(weight_map)

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a block of Qwen3 with experts. It returns what its MLP returns."""
        config, block = self.config, super().make_block(layer_index)
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        top_k = config.num_experts_per_tok
        router = Router(hidden, config.num_experts, top_k, normalize=config.norm_topk_prob)
        block.mlp = Experts(router, hidden, inner, config.activation)
        return block

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__(config)
        if config.output_router_logits:
            self.router_losses = config.router_aux_loss_coef, 0.0
