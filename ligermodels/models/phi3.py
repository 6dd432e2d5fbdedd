"""Phi-3 and Phi-4: Llama with packed checkpoints, windows, and rope on a part of each head."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ligermodels.errors import ConfigError
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.family import FamilyModel

_LENGTH = "original_max_position_embeddings"


@dataclass(kw_only=True)
class Phi3Config(ModelConfig):
    """Fields of a Phi-3 `config.json`, under HF's names and with HF's defaults."""

    model_type: ClassVar[str] = "phi3"
    rope_type_aliases: ClassVar[dict[str, str]] = {"su": "longrope", "yarn": "longrope"}
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

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):
            self.rope_scaling = {_LENGTH: 4096, **self.rope_scaling}
        super().__post_init__()

    def validate(self) -> None:
        """Check every field as `ModelConfig` does, and the type of the rope."""
        super().validate()
        kind = (self.rope_scaling or {}).get("rope_type", "longrope")
        if kind not in ("default", "longrope"):
            raise ConfigError(f"config: rope_scaling has rope_type {kind!r}, expected 'longrope'")

    @property
    def recomputes_keys_after(self) -> int | None:
        """The original length of longrope, beyond which all positions have other angles."""
        return (self.rope_scaling or {}).get(_LENGTH)


_PHI4 = {"vocab_size": 100352, "max_position_embeddings": 16384, "rope_theta": 250000.0}
_PHI4 |= {"pad_token_id": 100349, "bos_token_id": 100257, "eos_token_id": 100265}
# The long factors of Phi-4-mini for every pair of elements of a head that rope rotates.
_LONG = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817),
    *(2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023),
    *(4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372),
    *(10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807),
    *(22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66),
    *(32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)
_PHI4_MINI = {
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "rope_type": "longrope",
        _LENGTH: 4096,
        "short_factor": [1.0] * len(_LONG),
        "long_factor": [*_LONG],
    },
    "tie_word_embeddings": True,
    "pad_token_id": 199999,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
}

Phi3Config.presets = {
    "phi-3-mini-4k": sizes(3072, 8192, 32, 32, sliding_window=2047),
    "phi-3-medium-4k": sizes(5120, 17920, 40, 40, 10, sliding_window=2047),
    "phi-4": _PHI4 | sizes(5120, 17920, 40, 40, 10),
    "phi-4-mini": _PHI4_MINI | sizes(3072, 8192, 32, 24, 8),
}


@register
class LigerPhi3(FamilyModel):
    """The Phi-3 model, built from fused layers. Phi-4 is the same architecture.

    `model(input_ids)` returns hidden states. With labels it returns the head's output.
    """

    config_class = Phi3Config
    config: Phi3Config
    # These are packed in the checkpoint, too.
    hf_names: ClassVar[dict[str, str]] = {
        "self_attn.qkv_proj": "self_attn.qkv_proj",
        "mlp.gate_up_proj": "mlp.gate_up_proj",
    }

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + attention(norm(x)), then h + mlp(norm(h))."""
        return self.block_of(
            self.attention_of(layer_index, rotary_dim=self.config.rotary_dim), self.mlp_of()
        )
