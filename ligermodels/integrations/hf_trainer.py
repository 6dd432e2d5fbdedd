"""HF's Trainer without logits where nobody looks at them."""

from typing import Any

from ligermodels.integrations import require

require("transformers")

from torch import nn
from transformers import Trainer

from ligermodels.errors import ConfigError
from ligermodels.models.base import DecoderModel


class ResumesWithWords:
    """What the trainers of this package say where a checkpoint's optimizer states do not fit."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        try:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        except ValueError as error:
            if "parameter group" not in str(error):
                raise
            raise ConfigError(
                f"{checkpoint}: its optimizer states are for another number of parameters than the "
                "model has. If a model with HF's separate projections wrote them, such as one of "
                "transformers, load this one with from_pretrained(..., split_projections=True); if "
                "one with packed projections did, load it without"
            ) from error


class LigerTrainer(ResumesWithWords, Trainer):
    """`transformers.Trainer` that asks for no logits in an evaluation without metrics.

    Trainer itself asks for them in every evaluation, and then leaves them out. On a native model,
    which never returns logits, features that need them are refused.

    Raises:
        ConfigError: the model is a native one, and the arguments smooth labels, add noise to the
            embeddings (NEFTune) or ask for metrics; or a checkpoint to resume from has optimizer
            states for other projections.
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
