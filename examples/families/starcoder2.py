"""StarCoder2: layer norms with biases, and an MLP without a gate."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

import ligermodels as lm
from ligermodels.layers import Attention, DecoderBlock, LayerNorm, PreNormed


@dataclass(kw_only=True)
class Starcoder2Config(lm.ModelConfig):
    """Fields of a StarCoder2 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "starcoder2"
    key_aliases: ClassVar[dict[str, str]] = {"norm_epsilon": "rms_norm_eps"}
    # Dropout is not implemented: set these keys of a published config.json to 0.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "residual_dropout": (0,),
        "embedding_dropout": (0,),
    }
    small_fields: ClassVar[dict[str, Any]] = {"sliding_window": 7}

    vocab_size: int = 49152
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 30
    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.018042
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    sliding_window: int | None = None


class PlainMLP(nn.Module):
    """c_proj(act(c_fc(x)))."""

    def __init__(self, config: Starcoder2Config) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.use_bias
        acts = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh")}
        self.act = acts[config.activation]
        self.c_fc = nn.Linear(hidden, inner, bias=bias)
        self.c_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: PreNormed) -> tuple[Tensor, Tensor]:
        """Return the output, and the sum before the norm, like a `GatedMLP` in a block."""
        normed, total = x.apply()
        return self.c_proj(self.act(self.c_fc(normed))), total


@lm.register
class LigerStarcoder2(lm.DecoderModel):
    """The StarCoder2 model."""

    config_class = Starcoder2Config
    config: Starcoder2Config
    hf_names: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Starcoder2Config) -> None:
        super().__init__(config)
        self.build(norm=LayerNorm(config.hidden_size, config.rms_norm_eps))

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a block of Llama with other norms and another MLP."""
        config, hidden, eps = self.config, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(
            *(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            bias=config.use_bias,
            sliding_window=config.sliding_window,
            layer_index=layer_index,
        )
        norms = (LayerNorm(hidden, eps), LayerNorm(hidden, eps))
        return DecoderBlock(attention, PlainMLP(config), *norms)
