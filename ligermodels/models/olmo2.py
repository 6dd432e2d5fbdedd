"""OLMo 2: norms after attention and MLP instead of before, and norms of all query heads at once."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.layers import Attention, AttentionContext, GatedMLP, RMSNorm
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel


@dataclass(kw_only=True)
class Olmo2Config(ModelConfig):
    """Fields of an OLMo 2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "olmo2"

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 50279
    hidden_act: str = "silu"
    attention_bias: bool = False


_OLMO2 = {
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "pad_token_id": 100277,
    "eos_token_id": 100257,
}

Olmo2Config.presets = {
    "olmo-2-1b": _OLMO2 | sizes(2048, 8192, 16, 16),
    "olmo-2-7b": _OLMO2 | sizes(4096, 11008, 32, 32),
    "olmo-2-13b": _OLMO2 | sizes(5120, 13824, 40, 40),
    "olmo-2-32b": _OLMO2 | sizes(5120, 27648, 64, 40, 8),
}


class AllHeadsNorm(RMSNorm):
    """An RMS norm over all heads of a token at once."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise x (batch, seq, heads, head_dim)."""
        normed: Any = super().forward(x.flatten(-2))
        return normed.view_as(x)  # type: ignore[no-any-return]


class PostNormBlock(nn.Module):
    """h = x + norm(attention(x)); the output is h + norm(mlp(h))."""

    def __init__(
        self,
        self_attn: Attention,
        mlp: GatedMLP,
        post_attention_layernorm: RMSNorm,
        post_feedforward_layernorm: RMSNorm,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output. The input is also the sum of such a pair.

        No norm comes before attention to compute the sum, so it is computed here.
        """
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, context))
        return self.post_feedforward_layernorm(self.mlp(x)), x


@register
class LigerOlmo2(FamilyModel):
    """The OLMo 2 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Olmo2Config
    config: Olmo2Config
    norm_options: ClassVar[dict[str, Any]] = {"casting_mode": "gemma"}  # one rounding, at the end

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + norm(attention(x)), then h + norm(mlp(h))."""
        config, eps = self.config, self.config.rms_norm_eps
        q_size = config.num_attention_heads * config.head_dim
        k_size = config.num_key_value_heads * config.head_dim
        attention = self.attention_of(
            layer_index,
            q_norm=AllHeadsNorm(q_size, eps, **self.norm_options),
            k_norm=AllHeadsNorm(k_size, eps, **self.norm_options),
        )
        return PostNormBlock(attention, self.mlp_of(), self.norm_of(), self.norm_of())
