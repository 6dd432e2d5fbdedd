"""HF's Trainer without logits where nobody looks at them."""

from typing import Any

from torch import nn
from transformers import Trainer


class LigerTrainer(Trainer):
    """`transformers.Trainer` that asks for no logits in an evaluation without metrics.

    Trainer itself asks for them in every evaluation, and then leaves them out.
    """

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Return (loss, logits, labels) of a batch, or (loss, None, None)."""
        smooths = self.label_smoother is not None  # it computes its loss from logits
        if prediction_loss_only and "labels" in inputs and not smooths:
            inputs = {**inputs, "skip_logits": True}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
