"""GLM-4 (0414): Llama with norms on both sides, a packed MLP, and rope on half of each head."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

import ligermodels as lm
from ligermodels.layers import Attention, AttentionContext, GatedMLP, RMSNorm, pre_norm


@dataclass(kw_only=True)
class Glm4Config(lm.ModelConfig):
    """Fields of a GLM-4 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "glm4"

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    pad_token_id: int | None = 151329
    eos_token_id: int | list[int] | None = None  # None means three tokens: see __post_init__
    hidden_act: str = "silu"
    attention_bias: bool = True
    partial_rotary_factor: float = 0.5

    def __post_init__(self) -> None:
        if self.eos_token_id is None:
            self.eos_token_id = [151329, 151336, 151338]
        super().__post_init__()


class Glm4Block(nn.Module):
    """h = x + norm(attention(norm(x))); the output is h + norm(mlp(norm(h)))."""

    def __init__(self, config: Glm4Config, layer_index: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_self_attn_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = Attention(
            *(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            bias=config.attention_bias,
            out_bias=False,
            rotary_dim=config.rotary_dim,
            interleaved_rope=True,
            layer_index=layer_index,
        )
        self.mlp = GatedMLP(hidden, config.intermediate_size, activation=config.activation)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual), whose sum is the output, like that of the inputs."""
        x, residual = self.self_attn(pre_norm(self.input_layernorm, x, residual), context)
        x = self.post_self_attn_layernorm(x)
        x, residual = self.mlp(pre_norm(self.post_attention_layernorm, x, residual))
        return self.post_mlp_layernorm(x), residual


@lm.register
class LigerGlm4(lm.DecoderModel):
    """The GLM-4 model, built from fused layers."""

    config_class = Glm4Config
    config: Glm4Config
    # This is packed in the checkpoint, too.
    hf_names: ClassVar[dict[str, str]] = {"mlp.gate_up_proj": "mlp.gate_up_proj"}

    def __init__(self, config: Glm4Config) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size, config.rms_norm_eps))

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a `Glm4Block`."""
        return Glm4Block(self.config, layer_index)
