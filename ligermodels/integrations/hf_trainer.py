"""HF's Trainer without logits where nobody looks at them."""

from typing import Any

from ligermodels.integrations import require

require("transformers")

from torch import nn
from transformers import Trainer

from ligermodels.errors import ConfigError
from ligermodels.heads.classifier import SequenceClassifier
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models.base import DecoderModel


class LigerTrainer(Trainer):
    """`transformers.Trainer` that asks for no logits in an evaluation without metrics.

    Trainer itself asks for them in every evaluation, and then leaves them out. On a native model,
    which never returns logits, features that need them are refused; a native classifier returns
    logits, so that metrics and predictions work.

    Raises:
        ConfigError: the model is a native one, and the arguments smooth labels, add noise to the
            embeddings (NEFTune), compute a loss of their own or ask for metrics.
    """

    def __init__(self, model: Any = None, args: Any = None, **options: Any) -> None:
        asked = [
            name
            for name in ("label_smoothing_factor", "neftune_noise_alpha")
            if getattr(args, name, None)
        ]
        needs = ["compute_loss_func"]
        if not isinstance(model, SequenceClassifier):
            needs += ["compute_metrics", "preprocess_logits_for_metrics"]
        asked += [name for name in needs if options.get(name) is not None]
        if asked and isinstance(model, DecoderModel):
            raise _needs_wrapper(asked)
        super().__init__(model, args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Return the logits of a dataset, as Trainer does; a native decoder has none to return."""
        if isinstance(self.model, DecoderModel) and not isinstance(self.model, SequenceClassifier):
            raise _needs_wrapper(["predict"])
        return super().predict(*args, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Return (loss, logits, labels) of a batch, or (loss, None, None)."""
        # These compute the loss from logits.
        takes_logits = self.label_smoother is not None or self.compute_loss_func is not None
        adapted = hasattr(self.model, "get_base_model")  # by PEFT
        base = self.model.get_base_model() if adapted else self.model
        skips = isinstance(base, LigerForCausalLM) and not takes_logits
        if prediction_loss_only and "labels" in inputs and skips:
            inputs = {**inputs, "skip_logits": True}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def _needs_wrapper(asked: list[str]) -> ConfigError:
    return ConfigError(
        f"{', '.join(asked)}: Trainer needs the logits or the interface of transformers' models "
        "for this, which a native model does not have; pass LigerForCausalLM.from_native(model)"
    )
