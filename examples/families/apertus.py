"""Apertus: norms of queries and keys, and an MLP without a gate whose activation is learned."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import ligermodels as lm
from ligermodels.layers import Attention, DecoderBlock, PreNormed, RMSNorm

BETA, EPS = 0.5, -1e-6
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "original_max_position_embeddings": 8192}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(kw_only=True)
class ApertusConfig(lm.ModelConfig):
    """Fields of an Apertus `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "apertus"
    activations: ClassVar[dict[str, str]] = {"xielu": "xielu"}

    vocab_size: int = 131072
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    rope_theta: float = 12e6
    rope_scaling: dict[str, Any] | None = field(default_factory=LLAMA3.copy)
    pad_token_id: int | None = 3
    hidden_act: str = "xielu"
    attention_bias: bool = False


class ApertusMLP(nn.Module):
    """down(xIELU(up(x))). The slopes of xIELU are learned, and begin at 0.8: arXiv:2411.13010."""

    def __init__(self, config: ApertusConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.alpha_p = nn.Parameter(torch.full((1,), math.log(math.expm1(0.8))))
        self.alpha_n = nn.Parameter(torch.full((1,), math.log(math.expm1(0.8 - BETA))))

    def forward(self, normed: PreNormed) -> tuple[Tensor, Tensor]:
        """Return the output, and the sum before the norm, like a `GatedMLP` in a block."""
        x, total = normed.apply()
        x = self.up_proj(x)
        slope_p, slope_n = softplus(self.alpha_p), BETA + softplus(self.alpha_n)
        below = (torch.expm1(x.clamp(max=EPS)) - x) * slope_n
        return self.down_proj(torch.where(x > 0, slope_p * x * x, below) + BETA * x), total


@lm.register
class LigerApertus(lm.DecoderModel):
    """The Apertus model."""

    config_class = ApertusConfig
    config: ApertusConfig
    hf_names: ClassVar[dict[str, str]] = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
        "mlp.alpha_p": "mlp.act_fn.alpha_p",
        "mlp.alpha_n": "mlp.act_fn.alpha_n",
    }

    @classmethod
    def weight_map(cls, config: ApertusConfig) -> lm.WeightMap:
        """Return the map of `hf_names`. A checkpoint also has the constants of xIELU."""
        constants = {
            f"model.layers.{index}.mlp.act_fn.{name}": torch.tensor(value)
            for index in range(config.num_hidden_layers)
            for name, value in (("beta", BETA), ("eps", EPS))
        }
        return replace(super().weight_map(config), constants=constants)

    def __init__(self, config: ApertusConfig) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size, config.rms_norm_eps))

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a block of Llama with norms of the heads and another MLP."""
        config, hidden, eps = self.config, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(
            *(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            bias=config.attention_bias,
            q_norm=RMSNorm(config.head_dim, eps),
            k_norm=RMSNorm(config.head_dim, eps),
            layer_index=layer_index,
        )
        norms = (RMSNorm(hidden, eps), RMSNorm(hidden, eps))
        return DecoderBlock(attention, ApertusMLP(config), *norms)
