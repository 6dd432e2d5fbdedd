"""OLMo 2: norms after attention and MLP instead of before, and norms of all query heads at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

import ligermodels as lm
from ligermodels.layers import Attention, AttentionContext, GatedMLP, RMSNorm


@dataclass(kw_only=True)
class Olmo2Config(lm.ModelConfig):
    """Fields of an OLMo 2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "olmo2"

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 50279
    hidden_act: str = "silu"
    attention_bias: bool = False


def weight_map(config: Olmo2Config) -> lm.WeightMap:
    """Return the map from parameters to the tensors of an OLMo 2 checkpoint."""
    bias = config.attention_bias

    def attention(index: int, name: str, hf: str) -> Iterator[lm.Entry]:
        yield from lm.attention_entries(config, name, hf, qkv_bias=bias, out_bias=bias)
        heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
        for norm, count in heads.items():
            yield from lm.norm_entries(f"{name}.{norm}", f"{hf}.{norm}", count * config.head_dim)

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return lm.decoder_weight_map(config, norms=norms, attention=attention)


class AllHeadsNorm(RMSNorm):
    """An RMS norm over all heads of a token at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (batch, seq, heads, head_dim)."""
        return super().forward(x.flatten(-2)).view_as(x)


class Olmo2Block(nn.Module):
    """h = x + norm(attention(x)); the output is h + norm(mlp(h))."""

    def __init__(self, config: Olmo2Config, layer_index: int) -> None:
        super().__init__()
        hidden, eps, head = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.self_attn = Attention(
            *(hidden, heads, kv_heads, head),
            bias=config.attention_bias,
            q_norm=AllHeadsNorm(heads * head, eps, casting_mode="gemma"),
            k_norm=AllHeadsNorm(kv_heads * head, eps, casting_mode="gemma"),
            layer_index=layer_index,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps, casting_mode="gemma")
        self.mlp = GatedMLP(hidden, config.intermediate_size, activation=config.activation)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, casting_mode="gemma")

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output. The input is also the sum of such a pair.

        No norm comes before attention to compute the sum, so it is computed here.
        """
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, context))
        return self.post_feedforward_layernorm(self.mlp(x)), x


@lm.register
class LigerOlmo2(lm.DecoderModel):
    """The OLMo 2 model, built from fused layers."""

    config_class = Olmo2Config
    config: Olmo2Config
    weight_map = staticmethod(weight_map)

    def __init__(self, config: Olmo2Config) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size, config.rms_norm_eps, casting_mode="gemma"))

    def make_block(self, layer_index: int) -> nn.Module:
        """Return an `Olmo2Block`."""
        return Olmo2Block(self.config, layer_index)
