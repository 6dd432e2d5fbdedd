"""The loss head behind TRL's contract for a fused head: `model(..., fused_lm_head=True)`.

TRL's trainers take what they need of each token from such a call, and logits are never made.
"""

from contextlib import nullcontext
from dataclasses import dataclass

from ligermodels.integrations import require

require("transformers")

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ligermodels.layers import LossHead
from ligermodels.models.inputs import next_token_targets

# TRL's names of what it asks of each token -> the head's.
_STATS = {
    "log_probs": "log_probs",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "correct",
}


@dataclass
class FusedHeadOutput(ModelOutput):
    """The fields that TRL reads, under TRL's names.

    The fields of tokens are (batch, seq - 1), or (batch, seq) with shift_labels. They are 0 where
    the label is -100, and None if they were not asked for.
    """

    loss: Tensor | None = None  # sum of -log_probs / num_items_in_batch, or / number of labels
    log_probs: Tensor | None = None  # of each label
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None  # log of the sum of squared probabilities
    mean_logits: Tensor | None = None  # of the logits divided by the temperature
    is_top1: Tensor | None = None  # whether the label has the highest logit
    label_mask: Tensor | None = None  # whether the label is not -100
    aux_loss: Tensor | None = None


class FusedHead:
    """Answers a call with `fused_lm_head=True`.

    Attributes:
        temperature: the logits are divided by it.
        cast_to_fp32: whether the head computes in float32, outside autocast.
        outputs: the fields that are asked for; log_probs always is.
    """

    def __init__(self) -> None:
        self.temperature = 1.0
        self.cast_to_fp32 = False
        self.outputs: tuple[str, ...] = ("log_probs",)

    @staticmethod
    def targets(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor:
        """Return labels aligned with the hidden states. Those of shift_labels already are.

        As in transformers, the first token of a packed document is predicted from the document
        before it unless its label is -100; the collators set it to that.
        """
        if shift_labels is not None:
            return shift_labels
        assert labels is not None
        return next_token_targets(labels)

    def __call__(
        self,
        head: LossHead,
        hidden: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: float | Tensor | None,
    ) -> FusedHeadOutput:
        """Return what TRL asks for. The hidden states are (batch, seq, hidden)."""
        targets = self.targets(labels, shift_labels)
        if self.cast_to_fp32:
            hidden = hidden.float()
        context = (
            torch.autocast(hidden.device.type, enabled=False)
            if self.cast_to_fp32
            else nullcontext()
        )
        with context:
            tokens = self._tokens(head, hidden, targets)
        mask = targets != -100
        if shift_labels is None:  # The last position of a row has no next token.
            mask = mask[:, :-1]
            tokens = {name: values[:, :-1] for name, values in tokens.items()}
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -tokens["log_probs"].sum() / count
        return FusedHeadOutput(loss=loss, label_mask=mask, **tokens)

    def _tokens(self, head: LossHead, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
        asked = {_STATS[name]: name for name in {"log_probs", *self.outputs}}
        made = head(
            hidden,
            targets,
            reduction="none",
            temperature=self.temperature,
            # One look at the labels, as in TRL's head. A prompt then takes no time.
            skip_ignored=not torch.compiler.is_compiling(),
            return_token_stats=tuple(asked),
        )
        tokens = {name: getattr(made, f"token_{stat}") for stat, name in asked.items()}
        if "log_sum_sq_probs" in tokens:
            squares = tokens["log_sum_sq_probs"].detach()
            ignored = targets == -100
            tokens["log_sum_sq_probs"] = squares.masked_fill(ignored, 1).log()
        if "mean_logits" in tokens:
            tokens["mean_logits"] = tokens["mean_logits"].detach()
        return tokens
