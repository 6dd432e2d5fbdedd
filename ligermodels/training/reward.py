"""Reward models: a number for each completion, from pairs of which one is preferred."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ligermodels.losses import LossOutput, bradley_terry_loss
from ligermodels.models.base import DecoderModel
from ligermodels.training.losses import Reward
from ligermodels.training.objectives import Call
from ligermodels.training.packing import GroupBatch
from ligermodels.training.preferences import PairObjective


class RewardObjective(PairObjective):
    """The loss of Bradley and Terry's model, over the rewards of whole texts."""

    options: Reward
    shown = ("eval_accuracy", "accuracy")
    padding = 0

    def load(self, model: DecoderModel) -> int:
        """Find the padding, before which the model reads the last token of a text."""
        self.padding = model.config.pad_token_id or 0
        return 0

    def loss(self, call: Call, batch: GroupBatch, **normalizers: Tensor) -> LossOutput:  # type: ignore[override]
        """Return the loss of a batch, and its metrics."""
        position = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        is_padding = batch.position_ids != position  # where positions restart
        batch = replace(batch, input_ids=batch.input_ids.masked_fill(is_padding, self.padding))
        out: Any = call(batch, labels=None)
        chosen, rejected = out.logits.float()[:, 0].chunk(2)
        margins = [group.record.get("margin") for group in batch.groups]
        given = None if None in margins else torch.tensor(margins, device=chosen.device).float()
        options = self.options.formula_options(bradley_terry_loss)
        normalizer = normalizers["normalizer"]
        return bradley_terry_loss(chosen, rejected, margin=given, normalizer=normalizer, **options)
