"""KTO: a loss of completions that are desirable or not, without pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.loss_options import CrossEntropyOutput
from ligermodels.losses import Mean, kto_kl, kto_loss, token_metrics
from ligermodels.losses.terms import mean_of
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import read_judged
from ligermodels.training.losses import KTO
from ligermodels.training.objectives import Call, Files, log_probs_of
from ligermodels.training.packing import IGNORE_INDEX, GroupBatch
from ligermodels.training.preferences import PairObjective, reference_log_probs
from ligermodels.training.processes import summed, summed_output


class KTOObjective(PairObjective):
    """KTO: a loss of completions that are desirable or not."""

    shown = ("eval_loss", "loss")
    options: KTO
    formula = staticmethod(kto_loss)
    group_size = 1
    token_stats = ("entropy", "mean_logits")

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return completions, each with another one for the KL."""
        return read_judged(files, tokenizer, self.config.data.names)

    def begin(
        self, call: Call, batches: list[GroupBatch], *, shared: bool = False
    ) -> tuple[list[Any], dict[str, Mean]]:
        """Estimate the KL of the whole step, and keep only the rows of the loss."""
        rows = sum(len(batch.groups) for batch in batches if batch.num_targets)
        if shared:
            rows = summed({"rows": rows})["rows"]
        halves = [(_part(batch, 0), _part(batch, 1)) for batch in batches]
        if self.options.loss_type == "apo_zero_unpaired":
            return [first for first, _ in halves], {}
        kl = torch.zeros(())
        with torch.no_grad():
            for _, other in halves:
                log_probs = log_probs_of(call(other, reduction="none"))
                reference = reference_log_probs(call, other, self.reference_model)
                reference, mask = reference.to(log_probs.device), other.mask.to(log_probs.device)
                part = kto_kl(log_probs, reference, mask, normalizer=rows)
                kl = kl.to(part) + (part if other.num_targets else 0 * part)
        if shared:
            kl, _ = summed_output(kl, {})
        return [replace(first, kl=kl) for first, _ in halves], {}

    def counts(self, batch: GroupBatch) -> dict[str, int]:
        """Count completions."""
        return {"normalizer": len(batch.groups)}

    def inputs(
        self, tokens: CrossEntropyOutput, batch: GroupBatch, rows: Tensor
    ) -> dict[str, Tensor]:
        """Return the reference's log-probabilities, the labels and the KL of the step."""
        assert batch.ref_log_probs is not None
        found = {"ref_log_probs": batch.ref_log_probs[rows], "label": _labels(batch)[rows]}
        return found if batch.kl is None else {**found, "kl": batch.kl}

    def metrics(
        self, tokens: CrossEntropyOutput, batch: GroupBatch, rows: Tensor
    ) -> dict[str, Mean]:
        """Return the metrics that depend on the head's output alone."""
        mask, label = batch.mask[rows], _labels(batch)[rows, None]
        metrics = token_metrics(mask, entropy=tokens.entropy)
        assert tokens.mean_logits is not None
        for name, some in (("chosen", label), ("rejected", ~label)):
            metrics[f"logits/{name}"] = mean_of(tokens.mean_logits, mask & some)
        return metrics


def _labels(batch: GroupBatch) -> Tensor:
    """Return whether each completion is desirable: (rows) bool."""
    return torch.tensor([group.label for group in batch.groups], device=batch.mask.device)


def _part(batch: GroupBatch, number: int) -> GroupBatch:
    """Return the rows of a batch that are the groups' documents of this number."""
    count = len(batch.groups)
    part = batch.chosen(slice(number * count, (number + 1) * count))
    tokens = sum(len(group.documents[number]) for group in batch.groups)
    targets = int((part.labels != IGNORE_INDEX).sum())
    return replace(part, num_tokens=tokens, num_targets=targets) if batch.num_targets else part
