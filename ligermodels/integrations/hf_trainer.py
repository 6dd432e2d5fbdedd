"""HF's Trainer without logits where nobody looks at them."""

from typing import Any

from ligermodels.integrations import require

require("transformers")

from torch import nn
from transformers import Trainer

from ligermodels.integrations.hf_model import LigerForCausalLM


class LigerTrainer(Trainer):
    """`transformers.Trainer` that asks for no logits in an evaluation without metrics.

    Trainer itself asks for them in every evaluation, and then leaves them out. A native model never
    returns logits, so that nothing differs there.
    """

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
