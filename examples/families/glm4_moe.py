"""GLM-4.5: dense first layers, then experts beside an MLP that every token gets."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

import ligermodels as lm
from ligermodels.layers import Attention, DecoderBlock, Experts, GatedMLP, RMSNorm, Router


@dataclass(kw_only=True)
class Glm4MoeConfig(lm.ModelConfig):
    """Fields of a GLM-4.5 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "glm4_moe"
    refused: ClassVar[dict[str, Any]] = {"n_group": (1,), "topk_group": (1,)}
    activations: ClassVar[dict[str, str]] = {"silu": "silu"}
    small_fields: ClassVar[dict[str, Any]] = {"num_hidden_layers": 3, "n_routed_experts": 4}
    small_fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    largest = lm.ModelConfig.largest | {"n_routed_experts": 2**14, "num_experts_per_tok": 2**14}

    vocab_size: int = 151552
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    attention_bias: bool = False  # of q, k and v
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    first_k_dense_replace: int = 1  # the number of layers without experts
    moe_intermediate_size: int = 1408  # of each expert
    n_routed_experts: int = 128
    n_shared_experts: int = 1  # one MLP as wide as so many experts
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


class RoutedAndShared(nn.Module):
    """Experts and an MLP. It stands in a block where an MLP would."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        options = {"normalize": config.norm_topk_prob, "scale": config.routed_scaling_factor}
        options |= {"score": "sigmoid", "correction_bias": True, "float32": True}
        router = Router(hidden, config.n_routed_experts, config.num_experts_per_tok, **options)
        self.routed = Experts(router, hidden, inner)
        self.shared = GatedMLP(hidden, config.n_shared_experts * inner)

    def forward(self, x: Any, experts: Tensor | None = None) -> tuple:
        """Return the output, the sum that was normed, and the routes, for an x from `pre_norm`."""
        rows, total = x.apply()
        out, routes = self.routed(rows, experts)
        return out + self.shared(rows), total, routes


@lm.register
class LigerGlm4Moe(lm.LigerLlama):
    """The GLM-4.5 model, built from fused layers."""

    config_class = Glm4MoeConfig
    config: Glm4MoeConfig
    hf_names: ClassVar[dict[str, str]] = {
        "mlp.routed": "mlp",
        "mlp.routed.router": "mlp.gate",
        "mlp.routed.router.correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared": "mlp.shared_experts",
    }

    @classmethod
    def weight_map(cls, config: Glm4MoeConfig) -> lm.WeightMap:
        """Return the map of `hf_names`. It leaves out the layer for a second token."""
        ahead = lm.Towers((), (f"model.layers.{config.num_hidden_layers}.",))
        return replace(super().weight_map(config), towers=ahead)

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        config, hidden, eps = self.config, self.config.hidden_size, self.config.rms_norm_eps
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        options = {"bias": config.attention_bias, "out_bias": False, "layer_index": layer_index}
        norms = ("q_norm", "k_norm") if config.use_qk_norm else ()
        options |= {name: RMSNorm(config.head_dim, eps) for name in norms}
        attention = Attention(hidden, *heads, rotary_dim=config.rotary_dim, **options)
        dense = layer_index < config.first_k_dense_replace
        mlp = GatedMLP(hidden, config.intermediate_size) if dense else RoutedAndShared(config)
        return DecoderBlock(attention, mlp, RMSNorm(hidden, eps), RMSNorm(hidden, eps))
