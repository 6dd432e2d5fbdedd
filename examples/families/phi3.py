"""Phi-3 and Phi-4-mini: Llama with packed checkpoints, windows, and rope on a part of each head."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

import ligermodels as lm
from ligermodels.layers import Attention, DecoderBlock, GatedMLP, RMSNorm


@dataclass(kw_only=True)
class Phi3Config(lm.ModelConfig):
    """Fields of a Phi-3 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "phi3"
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"resid_pdrop": (0,), "embd_pdrop": (0,)}
    # transformers checks the factors of rope against hidden_size / num_attention_heads.
    small_fields: ClassVar[dict[str, Any]] = {
        "hidden_size": 64,
        "sliding_window": 7,
        "partial_rotary_factor": 0.75,
    }

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 32000
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 32000
    hidden_act: str = "silu"
    sliding_window: int | None = None
    partial_rotary_factor: float = 1.0  # 0.75 in Phi-4-mini

    @property
    def sliding_windows(self) -> list[int | None]:
        """The same window for every layer."""
        return [self.sliding_window] * self.num_hidden_layers


def weight_map(config: Phi3Config) -> lm.WeightMap:
    """Return the map from parameters to the tensors of a Phi-3 checkpoint, which are packed."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def linear(name: str, width: int, hf: str, rows: int) -> tuple[lm.Entry, ...]:
        return lm.linear_entries(name, width, (hf, rows))

    def attention(index: int, name: str, hf: str) -> tuple[lm.Entry, ...]:
        rows = (heads + 2 * kv_heads) * head
        qkv = linear(f"{name}.qkv_proj", hidden, f"{hf}.qkv_proj", rows)
        return qkv + linear(f"{name}.o_proj", heads * head, f"{hf}.o_proj", hidden)

    def mlp(index: int, name: str, hf: str) -> tuple[lm.Entry, ...]:
        gate_up = linear(f"{name}.gate_up_proj", hidden, f"{hf}.gate_up_proj", 2 * inner)
        return gate_up + linear(f"{name}.down_proj", inner, f"{hf}.down_proj", hidden)

    return lm.decoder_weight_map(config, attention=attention, mlp=mlp)


@lm.register
class LigerPhi3(lm.DecoderModel):
    """The Phi-3 model, built from fused layers."""

    config_class = Phi3Config
    config: Phi3Config
    weight_map = staticmethod(weight_map)

    def __init__(self, config: Phi3Config) -> None:
        super().__init__(config)
        self.build(norm=RMSNorm(config.hidden_size, config.rms_norm_eps))

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a block of Llama, which rotates a part of each head and may have a window."""
        config, hidden, eps = self.config, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(
            *(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            sliding_window=config.sliding_window,
            rotary_dim=config.rotary_dim,
            layer_index=layer_index,
        )
        mlp = GatedMLP(hidden, config.intermediate_size, activation=config.activation)
        return DecoderBlock(attention, mlp, RMSNorm(hidden, eps), RMSNorm(hidden, eps))
