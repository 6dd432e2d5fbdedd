"""Train Medusa's heads on a model: first with the model frozen, then together with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ligermodels.errors import ConfigError
from ligermodels.heads.medusa import MedusaHeads, MedusaModel
from ligermodels.heads.medusa_file import load_heads, save_heads
from ligermodels.losses import LossOutput, Mean
from ligermodels.models.base import DecoderModel
from ligermodels.training.losses import Medusa
from ligermodels.training.objectives import Call, Objective
from ligermodels.training.packing import Batch


class MedusaObjective(Objective):
    """The losses of heads for the tokens after the next one, and in the second stage of that."""

    options: Medusa
    shown = ("eval_head_1_loss", "loss of the first head")
    whole_model = True  # the heads start as copies of its projection, or share it
    trains_heads = True
    heads: MedusaHeads | None = None

    @property
    def keeps_tensors(self) -> bool:
        """In the first stage the model is frozen, and keeps nothing."""
        return self.options.medusa_stage == 2

    def module(self, model: DecoderModel) -> nn.Module:
        """Return the model with its heads, of which only the heads learn in the first stage."""
        options = self.options
        heads = None if model.source.folder is None else load_heads(model, model.source.folder)
        if heads is None or options.medusa_stage == 1:
            heads = MedusaHeads(model.head, options.medusa_heads, tied=options.medusa_tied)
        elif (len(heads.blocks), heads.tied) != (options.medusa_heads, options.medusa_tied):
            raise ConfigError(
                f"medusa_heads: {model.source.folder} holds {len(heads.blocks)} heads, tied: "
                f"{heads.tied}, from which stage 2 goes on; set medusa_heads and medusa_tied so"
            )
        self.heads = heads
        frozen = options.medusa_stage == 1
        model.requires_grad_(not frozen)
        return MedusaModel(model, heads, freeze_body=frozen)

    def loss(self, call: Call, batch: Batch, normalizer: Tensor, **_: Tensor) -> LossOutput:
        """Return the loss of the stage, and as metrics that of each head."""
        out: Any = call(batch, normalizer=normalizer)  # an DraftOutput
        # A head's loss was divided by the normalizer of the step, and counts few targets less.
        metrics = {
            f"head_{i}_loss": Mean(loss * normalizer, count)
            for i, (loss, count) in enumerate(zip(out.losses, out.num_valid), 1)
        }
        return LossOutput(out.loss, metrics)

    def export(self, folder: Path) -> None:
        """Write the heads beside the model, where `generate` finds them."""
        assert self.heads is not None
        save_heads(self.heads, folder)
