"""Granite: Llama with a factor on the embeddings, the scores, the sub-layers and the logits."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

import ligermodels as lm
from ligermodels.layers import Attention, AttentionContext, GatedMLP, RMSNorm, pre_norm


@dataclass(kw_only=True)
class GraniteConfig(lm.LlamaConfig):
    """The fields of Llama, and four factors, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "granite"
    positive = (
        *lm.LlamaConfig.positive,
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    )
    small_fields: ClassVar[dict[str, float]] = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.4,
        "logits_scaling": 3.0,
    }

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # the scale of the scores
    logits_scaling: float = 1.0  # the logits are divided by it


class GraniteBlock(nn.Module):
    """h = x + factor * attention(norm(x)); the output is h + factor * mlp(norm(h))."""

    def __init__(self, config: GraniteConfig, layer_index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.factor = config.residual_multiplier
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            *(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            bias=config.attention_bias,
            scale=config.attention_multiplier,
            layer_index=layer_index,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        inner, bias = config.intermediate_size, config.mlp_bias
        self.mlp = GatedMLP(hidden, inner, bias=bias, activation=config.activation)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output, like that of the inputs."""
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        x = self.factor * x
        x, residual = self.mlp(pre_norm(self.post_attention_layernorm, x, residual))
        return self.factor * x, residual


@lm.register
class LigerGranite(lm.DecoderModel):
    """The Granite model, built from fused layers."""

    config_class = GraniteConfig
    config: GraniteConfig
    weight_map = staticmethod(lm.LigerLlama.weight_map)

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config)
        self.build(
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps),
            embedding_scale=config.embedding_multiplier,
            logit_scale=1 / config.logits_scaling,
        )

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a `GraniteBlock`."""
        return GraniteBlock(self.config, layer_index)
