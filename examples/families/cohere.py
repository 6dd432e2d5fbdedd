"""Cohere (Command R): attention and MLP side by side, layer norms, and interleaved rope."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import ligermodels as lm
from ligermodels.layers import Attention, AttentionContext, GatedMLP, LayerNorm, pre_norm


@dataclass(kw_only=True)
class CohereConfig(lm.ModelConfig):
    """Fields of a Cohere `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "cohere"
    key_aliases: ClassVar[dict[str, str]] = {"layer_norm_eps": "rms_norm_eps"}

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 5
    eos_token_id: int | list[int] | None = 255001
    hidden_act: str = "silu"
    attention_bias: bool = False
    logit_scale: float = 0.0625
    use_qk_norm: bool = False


class EachHeadNorm(nn.LayerNorm):
    """A layer norm of each head; the weight (heads, head_dim) has a row for each head."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class CohereBlock(nn.Module):
    """The output is x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: CohereConfig, layer_index: int) -> None:
        super().__init__()
        hidden, eps, head = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.input_layernorm = LayerNorm(hidden, eps, bias=False)
        self.self_attn = Attention(
            *(hidden, heads, kv_heads, head),
            bias=config.attention_bias,
            q_norm=EachHeadNorm((heads, head), eps, bias=False) if config.use_qk_norm else None,
            k_norm=EachHeadNorm((kv_heads, head), eps, bias=False) if config.use_qk_norm else None,
            interleaved_rope=True,
            layer_index=layer_index,
        )
        self.mlp = GatedMLP(hidden, config.intermediate_size, activation=config.activation)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output, like that of the inputs."""
        normed, total = pre_norm(self.input_layernorm, x, residual).apply()
        return self.self_attn(normed, context) + self.mlp(normed), total


@lm.register
class LigerCohere(lm.DecoderModel):
    """The Cohere model, built from fused layers."""

    config_class = CohereConfig
    config: CohereConfig
    hf_names: ClassVar[dict[str, str]] = {}

    def __init__(self, config: CohereConfig) -> None:
        super().__init__(config)
        norm = LayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)
        self.build(norm=norm, logit_scale=config.logit_scale)

    def make_block(self, layer_index: int) -> nn.Module:
        return CohereBlock(self.config, layer_index)
