"""HF's Trainer without logits where nobody looks at them."""

from typing import Any

from ligermodels.integrations import require

require("transformers")

from torch import nn
from transformers import Trainer

from ligermodels.errors import ConfigError
from ligermodels.models.base import DecoderModel


class LigerTrainer(Trainer):
    """`transformers.Trainer` that asks for no logits in an evaluation without metrics.

    Trainer itself asks for them in every evaluation, and then leaves them out. On a native model,
    which never returns logits, features that need them are refused.

    Raises:
        ConfigError: the model is a native one, and the arguments smooth labels, add noise to the
            embeddings (NEFTune) or ask for metrics.
    """

    def __init__(self, model: Any = None, args: Any = None, **options: Any) -> None:
        asked = [
            name
            for name in ("label_smoothing_factor", "neftune_noise_alpha")
            if getattr(args, name, None)
        ]
        asked += [
            name
            for name in ("compute_metrics", "preprocess_logits_for_metrics")
            if options.get(name) is not None
        ]
        if asked and isinstance(model, DecoderModel):
            raise _needs_shell(asked)
        super().__init__(model, args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Return the logits of a dataset, as Trainer does; a native model has none to return."""
        if isinstance(self.model, DecoderModel):
            raise _needs_shell(["predict"])
        return super().predict(*args, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Return (loss, logits, labels) of a batch, or (loss, None, None)."""
        smooths = self.label_smoother is not None  # it computes its loss from logits
        has_logits = not isinstance(self.model, DecoderModel)
        if prediction_loss_only and "labels" in inputs and has_logits and not smooths:
            inputs = {**inputs, "skip_logits": True}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def _needs_shell(asked: list[str]) -> ConfigError:
    return ConfigError(
        f"{', '.join(asked)}: Trainer needs the logits or the interface of transformers' models "
        "for this, which a native model does not have; pass LigerForCausalLM.from_native(model)"
    )
