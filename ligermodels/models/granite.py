"""Granite 3: Llama with a factor on the embeddings, the scores, the sub-layers and the logits."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.layers import AttentionContext, DecoderBlock, GatedMLP, pre_norm
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class FactorsConfig(ModelConfig):
    """The fields that Granite 3 and Granite 4 have in common, with HF's defaults."""

    positive = (
        *ModelConfig.positive,
        *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    )
    small_fields: ClassVar[dict[str, Any]] = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.4,
        "logits_scaling": 3.0,
    }

    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    hidden_act: str = "silu"
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # the scale of the scores
    logits_scaling: float = 1.0  # the logits are divided by it


@dataclass(kw_only=True)
class GraniteConfig(FactorsConfig):
    """Fields of a Granite `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "granite"

    mlp_bias: bool = False


PUBLISHED: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}
_GRANITE3 = {"vocab_size": 49159, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}

GraniteConfig.presets = {
    "granite-3.3-2b": PUBLISHED
    | _GRANITE3
    | sizes(2048, 8192, 40, 32, 8, attention_multiplier=1 / 64, logits_scaling=8.0),
    "granite-3.3-8b": PUBLISHED
    | _GRANITE3
    | sizes(4096, 12800, 40, 32, 8, attention_multiplier=1 / 128, logits_scaling=16.0),
}


class ScaledBlock(DecoderBlock):
    """h = x + factor * attention(norm(x)); the output is h + factor * mlp(norm(h))."""

    def __init__(self, *parts: Any, factor: float) -> None:
        super().__init__(*parts)
        self.factor = factor

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output. See `DecoderBlock` for the arguments."""
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        normed = pre_norm(self.post_attention_layernorm, self.factor * x, residual)
        x, residual = self.mlp(normed)
        return self.factor * x, residual


class FactorsModel(FamilyModel):
    """What the models of Granite 3 and Granite 4 have in common."""

    config: FactorsConfig

    def __init__(self, config: FactorsConfig) -> None:
        factors = {"embedding_scale": config.embedding_multiplier}
        super().__init__(config, logit_scale=1 / config.logits_scaling, **factors)

    def scaled_block(self, layer_index: int, mlp: GatedMLP, rotary_dim: int) -> ScaledBlock:
        """Return a layer with this MLP, where rope rotates so many elements of a head."""
        config = self.config
        attention = self.attention_of(
            layer_index, scale=config.attention_multiplier, rotary_dim=rotary_dim
        )
        norms = self.norm_of(), self.norm_of()
        return ScaledBlock(attention, mlp, *norms, factor=config.residual_multiplier)


@register
class LigerGranite(FactorsModel):
    """The Granite model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = GraniteConfig
    config: GraniteConfig

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + factor * attention(norm(x)), then h + factor * mlp(norm(h))."""
        return self.scaled_block(layer_index, self.mlp_of(), self.config.head_dim)
