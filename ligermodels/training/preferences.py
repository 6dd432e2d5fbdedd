"""Losses of preferences: DPO, KTO, ORPO, CPO, SimPO and reward models, and reference models.

The reference's log-probabilities are computed once and kept in a file, so that no reference model
is in memory. The file lies in the folder of the run, and its name holds a hash of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.errors import CheckpointError
from ligermodels.kernels.loss_options import CrossEntropyOutput
from ligermodels.losses import (
    LossOutput,
    Mean,
    bradley_terry_loss,
    cpo_loss,
    dpo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    token_metrics,
)
from ligermodels.losses.terms import mean_of
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import reshard
from ligermodels.progress import track
from ligermodels.ranks import error_on_all_ranks, from_rank_0, gathered, rank
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import read_judged, read_pairs
from ligermodels.training.losses import DPO, KTO, Reward
from ligermodels.training.objectives import Call, Files, Objective, Rows, log_probs_of
from ligermodels.training.packing import IGNORE_INDEX, GroupBatch, GroupedRows, padded
from ligermodels.training.processes import partition, summed, summed_output
from ligermodels.training.run_dir import atomic_write, writing

_NAME = "log_probs"


class PairObjective(Objective):
    """A loss of a chosen and a rejected completion of each prompt.

    Attributes:
        formula: the function that computes it, with the options of the loss that it takes.
        prompt_targets: whether the prompts of the chosen completions are targets as well.
        has_reference: whether it compares the model with the one that the run starts from.
        divisible: whether the loss of a batch is the sum of those of its pairs.
        group_size: how many rows the formula compares.
        token_stats: what the head returns of each token, for the metrics.
    """

    shown = ("eval_rewards/accuracies", "reward accuracy")
    higher_is_better = True
    rows_per_item = 2
    formula: Callable[..., LossOutput]
    prompt_targets = False
    has_reference = False
    divisible = True
    group_size = 2
    token_stats: tuple[str, ...] = ("entropy", "correct", "mean_logits")

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return pairs."""
        return read_pairs(files, tokenizer, self.config.data.names)

    def rows(self, sources: Sequence[Sequence[Any]]) -> Rows:
        """Return pairs of rows."""
        return GroupedRows(sources[0], self.config.data.seq_len, prompt_targets=self.prompt_targets)

    def prepare(self, model: DecoderModel, call: Call, rows: Sequence[Rows], folder: Path) -> None:
        """Compute the reference's log-probabilities into a file, if the loss has a reference."""
        if not self.has_reference:
            return
        for each in rows:
            assert isinstance(each, GroupedRows)
            path = folder / f"{each.fingerprint()[:24]}.safetensors"
            found = stored_log_probs(
                path, each.num_targets, partial(_all_log_probs, call, each, self.batch_size)
            )
            each.reference = found.split(each.targets)
        reshard(model)

    def largest_batch(self, rows: Sequence[Rows]) -> tuple[int, int]:
        """Return the most rows of a forward pass, and their length with the padding."""
        count, longest = super().largest_batch(rows)
        return count, padded(longest)

    def counts(self, batch: GroupBatch) -> dict[str, int]:
        """Return the number of pairs, and of the targets in their chosen completions."""
        chosen = batch.labels[: len(batch.groups)]
        return {
            "normalizer": len(batch.groups),
            "token_normalizer": int((chosen != IGNORE_INDEX).sum()),
        }

    def inputs(
        self, tokens: CrossEntropyOutput, batch: GroupBatch, rows: Tensor
    ) -> dict[str, Tensor]:
        """Return what the formula takes beside log-probabilities and mask.

        Args: tokens: the head's output for some rows; rows: their numbers in the batch.
        """
        return {}

    def metrics(
        self, tokens: CrossEntropyOutput, batch: GroupBatch, rows: Tensor
    ) -> dict[str, Mean]:
        """Return the metrics that depend on the head's output alone."""
        stats = {name: getattr(tokens, name) for name in ("entropy", "correct", "mean_logits")}
        return token_metrics(batch.mask[rows], paired=True, **stats)

    def loss(self, call: Call, batch: GroupBatch, **normalizers: Tensor) -> LossOutput:  # type: ignore[override]
        """Return the loss of a batch, and its metrics."""
        options = self.options.formula_options(self.formula) | normalizers

        def of_rows(tokens: CrossEntropyOutput, rows: Tensor) -> LossOutput:
            inputs = self.inputs(tokens, batch, rows) | {"mask": batch.mask[rows]}
            loss, metrics = self.formula(log_probs_of(tokens), **inputs, **options)
            return LossOutput(loss, metrics | self.metrics(tokens, batch, rows))

        return self.loss_of_rows(
            *(call, batch, of_rows, len(batch.groups) / normalizers["normalizer"]),
            stats=self.token_stats,
            group_size=self.group_size,
            divisible=self.divisible,
        )


class DPOObjective(PairObjective):
    """DPO: how much more the model prefers the chosen completions than its reference does."""

    options: DPO
    formula = staticmethod(dpo_loss)
    has_reference = True

    def open(self, tokenizer: Tokenizer) -> None:
        """Check that no options exclude each other."""
        self.divisible = self.options.loss_type not in ("aot", "aot_unpaired")
        if self.options.use_weighting:
            self.token_stats += ("sum_sq_probs",)
        nothing = torch.zeros(2, 1)
        options = self.options.formula_options(dpo_loss)
        dpo_loss(nothing, nothing, nothing > 0, log_sum_sq_probs=nothing, **options)

    def inputs(
        self, tokens: CrossEntropyOutput, batch: GroupBatch, rows: Tensor
    ) -> dict[str, Tensor]:
        """Return the reference's log-probabilities, and for WPO what weights the pairs."""
        assert batch.ref_log_probs is not None
        found = {"ref_log_probs": batch.ref_log_probs[rows]}
        if tokens.sum_sq_probs is not None:
            # Outside the mask they are 0, whose logarithm would give NaN.
            sums = torch.where(batch.mask[rows], tokens.sum_sq_probs, 1.0)
            found["log_sum_sq_probs"] = sums.log()
        return found


class ORPOObjective(PairObjective):
    """ORPO: the likelihood of the chosen texts, prompts included, and the odds of the answers."""

    formula = staticmethod(orpo_loss)
    prompt_targets = True

    def inputs(
        self, tokens: CrossEntropyOutput, batch: GroupBatch, rows: Tensor
    ) -> dict[str, Tensor]:
        """Return the mask of the likelihood."""
        return {"nll_mask": F.pad(batch.labels[rows][:, 1:] != IGNORE_INDEX, (0, 1))}


class CPOObjective(PairObjective):
    """CPO and SimPO: a margin between the completions, and the likelihood of the chosen ones."""

    formula = staticmethod(cpo_loss)


class KTOObjective(PairObjective):
    """KTO: a loss of completions that are desirable or not."""

    shown = ("eval_loss", "loss")
    options: KTO
    formula = staticmethod(kto_loss)
    has_reference = True
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
                other = other.to(log_probs.device)
                assert other.ref_log_probs is not None
                part = kto_kl(log_probs, other.ref_log_probs, other.mask, normalizer=rows)
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


class RewardObjective(PairObjective):
    """The loss of Bradley and Terry's model, over the rewards of whole texts."""

    options: Reward
    shown = ("eval_accuracy", "accuracy")
    padding = 0

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return pairs, whose margins are checked."""
        return read_pairs(files, tokenizer, self.config.data.names, margins=True)

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
        margins = [float(group.record.get("margin") or 0) for group in batch.groups]
        margin = torch.tensor(margins, device=chosen.device)
        options = self.options.formula_options(bradley_terry_loss)
        normalizer = normalizers["normalizer"]
        return bradley_terry_loss(chosen, rejected, margin=margin, normalizer=normalizer, **options)


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


@torch.no_grad()
def _all_log_probs(call: Call, rows: GroupedRows, batch_size: int) -> Tensor:
    """Return the log-probabilities of all targets, in the order of the groups."""
    starts = range(0, len(rows), batch_size)
    mine, parts = [], partition(starts)
    for start, _ in track(parts, "asking the reference model", len(parts)):
        batch = rows.batch(range(start, min(start + batch_size, len(rows))))
        log_probs = log_probs_of(call(batch, reduction="none")).cpu()
        count = len(batch.groups)
        places = [row for i in range(count) for row in range(i, count * rows.per_group, count)]
        mine.append(torch.cat([log_probs[row, batch.mask[row]] for row in places]))
    every = gathered(mine)
    return torch.cat([every[i % len(every)][i // len(every)] for i in range(len(starts))])


def stored_log_probs(path: Path, count: int, compute: Callable[[], Tensor]) -> Tensor:
    """Return the numbers in a file; if there is no file, compute and write them first.

    Args:
        path: its folder is made.
        count: how many numbers there are.
        compute: returns them, (count) float32. All ranks call it together, and rank 0 writes.
    Returns: (count) float32, on the CPU.
    Raises:
        CheckpointError: the file cannot be read, or holds another number of values.
        SaveError: the file cannot be written.
    """
    if not from_rank_0(path.exists()):
        values = compute().detach().float().cpu().contiguous()
        assert values.shape == (count,), values.shape
        with error_on_all_ranks(), writing(path):
            if rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, lambda part: save_file({_NAME: values}, part))
        return values
    with error_on_all_ranks():
        values = SafetensorsFile(path).tensor(_NAME)
        if values.shape != (count,):
            raise CheckpointError(
                f"{path}: these are not the log-probabilities of the data; remove the file, and "
                "they are computed again"
            )
        return values
