"""The fields of a config that the families with experts share."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.errors import ConfigError
from ligermodels.models.config import ModelConfig


@dataclass(kw_only=True)
class ExpertsConfig(ModelConfig):
    """The fields of all families with experts, under HF's names and with HF's defaults."""

    # The field with the number of experts, and the other key that transformers reads as the same.
    experts_field: ClassVar[str] = "num_local_experts"
    key_aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}
    largest: ClassVar[dict[str, int]] = ModelConfig.largest | {
        **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), 2**14),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**22),
    }
    small_fields: ClassVar[dict[str, Any]] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.5,
    }

    num_experts_per_tok: int = 2
    output_router_logits: bool = False  # whether the loss contains the balance of the experts
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0  # a key of this library: the factor of `router_z_loss`

    def validate(self) -> None:
        """Check every field, as in `ModelConfig`."""
        super().validate()
        chosen, count = self.num_experts_per_tok, getattr(self, self.experts_field)
        if chosen > count:
            raise ConfigError(
                f"config: num_experts_per_tok is {chosen}; expected at most {self.experts_field} = "
                f"{count}"
            )
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"config: {name} is {getattr(self, name)}; expected a number of at least 0"
                )

    @property
    def router_losses(self) -> tuple[float, float]:
        """The factors of the balance of experts and of the routers' z-loss in the loss."""
        balance = self.router_aux_loss_coef if self.output_router_logits else 0.0
        return balance, self.router_z_loss_coef
