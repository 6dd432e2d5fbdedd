"""Granite 4, dense models: Granite 3 with gate and up in one tensor, and optional positions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligermodels.errors import ConfigError
from ligermodels.models.auto import register
from ligermodels.models.config import ModelConfig, sizes
from ligermodels.models.granite import PUBLISHED, FactorsConfig, FactorsModel


@dataclass(kw_only=True)
class Granite4Config(FactorsConfig):
    """Fields of a dense Granite 4 `config.json`, under HF's names.

    The architecture also has layers of Mamba-2 and experts, which are not implemented. HF's
    defaults of `layer_types` and `num_local_experts` describe those, so an export writes both.
    """

    model_type: ClassVar[str] = "granitemoehybrid"
    architecture: ClassVar[str | None] = "GraniteMoeHybridForCausalLM"
    largest = ModelConfig.largest | {"shared_intermediate_size": 2**22}
    written: ClassVar[tuple[str, ...]] = ("layer_types", "num_local_experts")
    layer_type_names: ClassVar[tuple[str, ...]] = ("attention", "full_attention")
    # transformers divides twice the hidden size among 128 heads of Mamba, used or not.
    small_fields = FactorsConfig.small_fields | {
        "hidden_size": 64,
        "shared_intermediate_size": 56,
        "position_embedding_type": "rope",
    }

    shared_intermediate_size: int = 1024  # of the MLP; intermediate_size is that of experts
    position_embedding_type: str | None = None  # "rope"; with any other, no layer has positions
    num_local_experts: int = 0
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        if self.layer_types is None:
            self.layer_types = ["attention"] * self.num_hidden_layers
        super().__post_init__()

    def validate(self) -> None:
        """Check every field as `ModelConfig` does, and that there are no experts."""
        if self.num_local_experts:
            raise ConfigError(
                f"config: num_local_experts is {self.num_local_experts}; Granite 4 with experts "
                "is not implemented; choose a dense model, which has 0"
            )
        super().validate()


Granite4Config.presets = {
    "granite-4.0-micro": PUBLISHED
    | sizes(2560, 8192, 40, 40, 8, attention_multiplier=1 / 64, logits_scaling=10.0)
    | {"vocab_size": 100352, "shared_intermediate_size": 8192, "position_embedding_type": "rope"}
    | {"pad_token_id": 100256, "bos_token_id": 100257, "eos_token_id": 100257}
}


@register
class LigerGranite4(FactorsModel):
    """The dense Granite 4 model, built from fused layers.

    `model(input_ids)` returns hidden states. With labels it returns the head's output. In a
    `LigerForCausalLM`, PEFT finds the linears of the MLP as gate_up_proj and down_proj; adapters of
    `ligermodels.adapters` have HF's names, input_linear and output_linear.
    """

    config_class = Granite4Config
    config: Granite4Config
    # The first one is packed in the checkpoint, too.
    hf_names: ClassVar[dict[str, str]] = {
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    }

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a layer: h = x + factor * attention(norm(x)), then h + factor * mlp(norm(h))."""
        config = self.config
        mlp = self.mlp_of(config.shared_intermediate_size)
        rotated = config.head_dim if config.position_embedding_type == "rope" else 0
        return self.scaled_block(layer_index, mlp, rotated)
