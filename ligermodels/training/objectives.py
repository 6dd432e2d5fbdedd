"""What a run minimises: one class for each kind of loss. The trainer knows no loss by name.

An objective turns files into rows, and batches of rows into a loss. It calls the model through the
trainer, which knows about devices and precision. The losses are those of `ligermodels.losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.adapters.reference import WithoutAdapters, frozen_copy
from ligermodels.errors import ConfigError
from ligermodels.kernels.cross_entropy import CrossEntropyOutput
from ligermodels.layers import HeadOutput
from ligermodels.layers.fusion import is_sharded
from ligermodels.losses import (
    LossOutput,
    Mean,
    cpo_loss,
    dpo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    sft_loss,
    token_metrics,
)
from ligermodels.losses.terms import mean_of
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.layout import local_tensor, reshard
from ligermodels.parallel.ranks import gathered
from ligermodels.parallel.shard import shard
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.data import read_documents
from ligermodels.training.grouped import GroupBatch, GroupedRows, padded
from ligermodels.training.packing import IGNORE_INDEX, Batch, PackedRows
from ligermodels.training.preference_data import read_judged, read_pairs
from ligermodels.training.processes import partition, summed, summed_output
from ligermodels.training.reference_file import reference_path, stored_log_probs

STATS = ("entropy", "correct", "mean_logits")  # of each token, for the metrics of pairs
Files = Sequence[str | Path]
Rows = PackedRows | GroupedRows


class Call(Protocol):
    """How an objective calls the model: `call(batch, **options)` returns the head's output.

    `options` are those of the loss head, and `model` is another model than the trained one.
    """

    def __call__(
        self, batch: Batch, *, model: nn.Module | None = None, **options: Any
    ) -> HeadOutput: ...


class Objective:
    """The mean loss of the next token: the base class of all others.

    Attributes:
        shown: the metric of an evaluation that tells how good the model is, and its name.
        evaluates_loss: whether an evaluation measures the loss.
        rows_per_item: how many rows of the model one item of the data makes.
        whole_model: whether each of several processes holds the whole model, not a part of it.
    """

    shown = ("eval_perplexity", "perplexity")
    evaluates_loss = True
    rows_per_item = 1
    whole_model = False

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Look at the model's tokenizer, before any data are read.

        Raises:
            ConfigError: the objective cannot be used with these tokens.
        """

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return the items of data files.

        Raises:
            DataError: a file or a line is wrong.
        """
        return read_documents(files, tokenizer, separator=self.config.separator)

    def rows(self, items: list[Any]) -> Rows:
        """Return the rows from which batches are made.

        Raises:
            DataError: nothing is left to train on.
        """
        return PackedRows(items, self.config.seq_len, self.row_multiple)

    @property
    def row_multiple(self) -> int:
        """What the width of rows is a multiple of: ranks that share a row cut it into chunks."""
        ranks = self.config.context_parallel
        return 1 if ranks == 1 else 2 * ranks

    def load(self, model: DecoderModel) -> int:
        """Load what the run needs beside the model, which has its first weights.

        Returns: how many bytes on the model's device it takes.
        """
        return 0

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of each other model that was loaded, by its option."""
        return {}

    def module(self, model: DecoderModel) -> nn.Module:
        """Return what is trained and called with batches: the model, or a module that has it."""
        return model

    def planned_step(self, trained: nn.Module, rows: Sequence[Rows]) -> nn.Module:
        """Return what a step runs forward, for the memory plan: `module`, or one that has it."""
        return trained

    def export(self, folder: Path) -> None:
        """Write what belongs to the model into the folder that it was exported to."""

    def prepare(
        self, model: DecoderModel, call: Call, rows: Sequence[Rows], folder: Path, base: str
    ) -> None:
        """Do what must be done before the first step, with the weights that the run starts from.

        Args: rows: all rows of the run; folder: a place for files; base: a hash of the weights.
        """

    def largest_batch(self, rows: Sequence[Rows]) -> tuple[int, int]:
        """Return the most rows of a forward pass, and their length, for the memory plan."""
        width = max(each.width for each in rows)
        return self.batch_size * self.rows_per_item, width

    @property
    def batches_per_step(self) -> int:
        """How many batches of the data a step reads."""
        return self.config.gradient_accumulation_steps

    @property
    def batch_size(self) -> int:
        """How many items of the data a batch holds."""
        return self.config.batch_size

    def begin(
        self, call: Call, batches: list[Any], *, shared: bool = False
    ) -> tuple[list[Any], dict[str, Mean]]:
        """Return the micro-batches of a step, and metrics that are known before its forward.

        Args: shared: whether the other ranks have other batches of the step.
        """
        return batches, {}

    def counts(self, batch: Any) -> dict[str, int]:
        """Return what a batch adds to the normalizers of its step, named as `loss` takes them."""
        return {"normalizer": batch.num_targets}

    def loss(self, call: Call, batch: Any, normalizer: Tensor, **_: Tensor) -> LossOutput:
        """Return the loss of a batch, divided by the normalizers of the step, and its metrics.

        An evaluation measures the loss of the next token alone, because its exponential is the
        perplexity: without what layers add, and without the weights of a loss_type.

        Args: batch: on the device of the model.
        """
        if not torch.is_grad_enabled():
            return LossOutput(call(batch, reduction="sum").loss / normalizer, {})
        if self.config.loss_type in (None, "nll"):
            return LossOutput(call(batch, normalizer=normalizer).loss, {})
        targets = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        ends = F.pad(batch.position_ids[:, 1:] == 0, (0, 1), value=True)
        mask = (targets != IGNORE_INDEX) & ~ends
        kind = self.config.loss_type

        def of_rows(tokens: CrossEntropyOutput, rows: Tensor) -> LossOutput:
            log_probs = log_probs_of(tokens)
            return sft_loss(log_probs, mask[rows], loss_type=kind, normalizer=normalizer)

        share = self.counts(batch)["normalizer"] / normalizer
        return self.loss_of_rows(call, batch, of_rows, share)

    def loss_of_rows(
        self,
        call: Call,
        batch: Batch,
        of_rows: Callable[[CrossEntropyOutput, Tensor], LossOutput],
        share: float | Tensor,
        *,
        stats: Collection[str] = (),
        group_size: int = 1,
        divisible: bool = True,
    ) -> LossOutput:
        """Return a loss that the head computes while it has the logits of whole groups of rows.

        That costs three matrix products of the head and not four, if a group's logits fit.

        Args:
            of_rows: a function of the token outputs of some rows, and of the numbers that these
                rows have in the batch, in ascending order. What it returns for several parts of the
                batch is added up.
            share: the batch's fraction of the step, which scales what layers add to the loss, such
                as the balance of experts; the fractions of the micro-batches add up to 1.
            stats: of each token, beside the loss, which is -log p.
            group_size: of a batch of group_size * n rows, rows i, n + i, 2n + i, ... are a group.
            divisible: whether the loss of a batch is the sum of those of its groups.
        """
        numbers = torch.arange(len(batch.labels), device=batch.labels.device)
        if self.config.compile or self.config.context_parallel > 1:
            # A function that is new for each batch would be compiled for each batch, and a rank
            # that has a part of each row has no whole ones.
            out = call(batch, reduction="none", return_token_stats=stats)
            tokens = CrossEntropyOutput(
                *(out.loss, out.z_loss, out.loss),
                entropy=out.token_entropy,
                correct=out.token_correct,
                sum_sq_probs=out.token_sum_sq_probs,
                mean_logits=out.token_mean_logits,
            )
            loss, metrics = of_rows(tokens, numbers)
        else:
            # The head wants the rows of a group beside each other: 0, n, 1, n + 1, ... for pairs.
            order = numbers.view(group_size, -1).T.flatten()
            metrics = {}

            def of_neighbours(tokens: CrossEntropyOutput, part: slice) -> Tensor:
                def ascending(x: Tensor) -> Tensor:
                    return x.unflatten(0, (-1, group_size)).transpose(0, 1).flatten(0, 1)

                sorted_tokens: list[Any] = [None if x is None else ascending(x) for x in tokens]
                loss, found = of_rows(CrossEntropyOutput(*sorted_tokens), ascending(order[part]))
                for name, mean in found.items():
                    metrics[name] = metrics[name] + mean if name in metrics else mean
                return loss

            out = call(
                batch.in_order(order),
                loss_function=of_neighbours,
                group_size=group_size if divisible else len(order),
                return_token_stats=stats,
            )
            loss = out.loss
        if out.auxiliary_loss is not None:
            loss = loss + share * out.auxiliary_loss
        return LossOutput(loss, metrics)


def log_probs_of(out: HeadOutput | CrossEntropyOutput) -> Tensor:
    """Return the log-probabilities of an output that was made with reduction "none"."""
    return 0.0 - out.loss


class PairObjective(Objective):
    """DPO and its relatives, ORPO, CPO and SimPO: losses of a chosen and a rejected completion."""

    shown = ("eval_rewards/accuracies", "reward accuracy")
    rows_per_item = 2

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__(config)
        self.needs_reference = config.loss == "dpo"
        if config.loss == "dpo":  # options that exclude each other are an error before the run
            nothing = torch.zeros(2, 1)
            options = given(config, "loss_type", "label_smoothing")
            options |= self._dpo_options(nothing, nothing > 0)
            dpo_loss(nothing, nothing, nothing > 0, **options)
        self.reference_model: nn.Module | None = None

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return pairs."""
        return read_pairs(files, tokenizer)

    def rows(self, items: list[Any]) -> Rows:
        """Return pairs of rows. ORPO's likelihood also covers the prompts."""
        return GroupedRows(items, self.config.seq_len, prompt_targets=self.config.loss == "orpo")

    def load(self, model: DecoderModel) -> int:
        """Copy the model, if the reference is not a file."""
        if not self.needs_reference or self.config.reference in (None, "file"):
            return 0
        self.reference_model = reference_copy(model, self.config.reference, self.config.precision)
        return bytes_here(self.reference_model)

    def prepare(
        self, model: DecoderModel, call: Call, rows: Sequence[Rows], folder: Path, base: str
    ) -> None:
        """Compute the reference's log-probabilities into a file, if there is no copy."""
        if not self.needs_reference or self.reference_model is not None:
            return
        for each in rows:
            assert isinstance(each, GroupedRows)
            path = reference_path(folder, base, each.fingerprint(), str(self.config.seq_len))
            each.reference = stored_log_probs(
                path, each.num_targets, partial(_all_log_probs, call, each, self.batch_size)
            )
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

    def loss(  # type: ignore[override]
        self, call: Call, batch: GroupBatch, normalizer: Tensor, token_normalizer: Tensor
    ) -> LossOutput:
        """Return the loss of the pairs of a batch, and its metrics."""
        config = self.config
        stats = STATS + (("sum_sq_probs",) if config.use_weighting else ())
        counts = {"normalizer": normalizer, "token_normalizer": token_normalizer}
        options = given(config, "beta", "label_smoothing", "loss_type") | counts
        if config.loss == "simpo":
            options |= {"loss_type": "simpo", "cpo_alpha": 0.0}
        nll_mask = F.pad(batch.labels[:, 1:] != IGNORE_INDEX, (0, 1))
        if config.loss == "dpo":
            reference = reference_log_probs(call, batch, self.reference_model)

        def of_pairs(tokens: CrossEntropyOutput, rows: Tensor) -> LossOutput:
            log_probs, mask = log_probs_of(tokens), batch.mask[rows]
            if config.loss == "orpo":
                loss, metrics = orpo_loss(log_probs, mask, nll_mask=nll_mask[rows], **options)
            elif config.loss == "dpo":
                of_dpo = self._dpo_options(tokens.sum_sq_probs, mask)
                loss, metrics = dpo_loss(log_probs, reference[rows], mask, **options, **of_dpo)
            else:
                more = given(config, "simpo_gamma")
                loss, metrics = cpo_loss(log_probs, mask, **options, **more)
            metrics |= token_metrics(
                mask,
                entropy=tokens.entropy,
                correct=tokens.correct,
                mean_logits=tokens.mean_logits,
                paired=True,
            )
            return LossOutput(loss, metrics)

        return self.loss_of_rows(
            *(call, batch, of_pairs, len(batch.groups) / normalizer),
            stats=stats,
            group_size=2,
            divisible=config.loss_type not in ("aot", "aot_unpaired"),
        )

    def _dpo_options(self, sum_sq_probs: Tensor | None, mask: Tensor) -> dict[str, Any]:
        """Return the options that only DPO has, and those that exclude each other."""
        names = ("f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "discopop_tau")
        options = given(self.config, *names)
        if self.config.use_weighting:
            assert sum_sq_probs is not None
            # Outside the mask they are 0, whose logarithm would give NaN.
            logs = torch.where(mask, sum_sq_probs, 1.0).log()
            options |= {"use_weighting": True, "log_sum_sq_probs": logs}
        return options


class KTO(PairObjective):
    """KTO: a loss of completions that are desirable or not."""

    shown = ("eval_loss", "loss")

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__(config)
        self.needs_reference = True

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return completions, each with another one for the KL."""
        return read_judged(files, tokenizer)

    def begin(
        self, call: Call, batches: list[GroupBatch], *, shared: bool = False
    ) -> tuple[list[Any], dict[str, Mean]]:
        """Estimate the KL of the whole step, and keep only the rows of the loss."""
        rows = sum(len(batch.groups) for batch in batches if batch.num_targets)
        if shared:
            rows = summed({"rows": rows})["rows"]
        halves = [(_part(batch, 0), _part(batch, 1)) for batch in batches]
        if self.config.loss_type == "apo_zero_unpaired":
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

    def loss(  # type: ignore[override]
        self, call: Call, batch: GroupBatch, normalizer: Tensor
    ) -> LossOutput:
        """Return the loss of the completions of a batch, and its metrics."""
        labels = [group.label for group in batch.groups]
        desirable = torch.tensor(labels, device=batch.mask.device)
        reference = reference_log_probs(call, batch, self.reference_model)
        names = "beta", "loss_type", "desirable_weight", "undesirable_weight"
        options = given(self.config, *names) | {"normalizer": normalizer}

        def of_rows(tokens: CrossEntropyOutput, rows: Tensor) -> LossOutput:
            log_probs, mask, label = log_probs_of(tokens), batch.mask[rows], desirable[rows]
            kl = 0.0 if batch.kl is None else batch.kl
            loss, metrics = kto_loss(log_probs, reference[rows], mask, label, kl, **options)
            metrics |= token_metrics(mask, entropy=tokens.entropy)
            assert tokens.mean_logits is not None
            for name, some in (("chosen", label), ("rejected", ~label)):
                metrics[f"logits/{name}"] = mean_of(tokens.mean_logits, mask & some[:, None])
            return LossOutput(loss, metrics)

        share = len(batch.groups) / normalizer
        return self.loss_of_rows(call, batch, of_rows, share, stats=("entropy", "mean_logits"))


def given(config: FinetuneConfig, *names: str) -> dict[str, Any]:
    """Return the options that a config sets. The loss functions have defaults for the others."""
    options = {name: getattr(config, name) for name in names}
    return {name: value for name, value in options.items() if value is not None}


def reference_copy(model: DecoderModel, dtype: str, precision: str | None) -> nn.Module:
    """Return a frozen copy of a model that has its first weights; of a sharded one, a sharded copy.

    With "adapters-off" instead of a dtype, it is the model itself, without its adapters.

    Args: precision: the run's precision. If it is mixed, the copy computes in bfloat16, too.
    Raises:
        ConfigError: the dtype is int8 and the model is sharded.
    """
    if dtype == "adapters-off":
        return WithoutAdapters(model)
    if not any(map(is_sharded, model.parameters())):
        return frozen_copy(model, dtype)
    if dtype == "int8":
        raise ConfigError(
            "reference: 8-bit weights are not spread over several processes; take bfloat16, or the "
            "file, which needs no copy"
        )
    assert model.source_folder is not None
    wide = getattr(torch, dtype)
    copy = type(model).from_hf(model.source_folder, dtype=wide, device="meta")
    # No autocast surrounds the forward of a sharded model.
    compute_dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    return shard(copy.requires_grad_(False).eval(), compute_dtype=compute_dtype)


def bytes_here(model: nn.Module) -> int:
    """Return the bytes of a model's weights on this rank."""
    return sum(local_tensor(x).nbytes for x in (*model.parameters(), *model.buffers()))


def reference_log_probs(call: Call, batch: GroupBatch, model: nn.Module | None) -> Tensor:
    """Return the reference model's log-probabilities of a batch, stored or computed by `model`."""
    if model is None:
        assert batch.ref_log_probs is not None
        return batch.ref_log_probs
    with torch.no_grad():
        log_probs = log_probs_of(call(batch, model=model, reduction="none"))
    reshard(model)
    return log_probs


@torch.no_grad()
def _all_log_probs(call: Call, rows: GroupedRows, batch_size: int) -> Tensor:
    """Return the log-probabilities of all targets, in the order of the groups."""
    starts = range(0, len(rows), batch_size)
    mine = []
    for start, _ in partition(starts):
        batch = rows.batch(range(start, min(start + batch_size, len(rows))))
        log_probs = log_probs_of(call(batch, reduction="none")).cpu()
        count = len(batch.groups)
        places = [row for i in range(count) for row in range(i, count * rows.per_group, count)]
        mine.append(torch.cat([log_probs[row, batch.mask[row]] for row in places]))
    every = gathered(mine)
    return torch.cat([every[i % len(every)][i // len(every)] for i in range(len(starts))])


def _part(batch: GroupBatch, number: int) -> GroupBatch:
    """Return the rows of a batch that are the groups' documents of this number."""
    count = len(batch.groups)
    rows = slice(number * count, (number + 1) * count)
    reference = batch.ref_log_probs
    part = replace(
        batch,
        input_ids=batch.input_ids[rows],
        labels=batch.labels[rows],
        position_ids=batch.position_ids[rows],
        mask=batch.mask[rows],
        num_tokens=sum(len(group.documents[number]) for group in batch.groups),
        num_targets=int((batch.labels[rows] != IGNORE_INDEX).sum()),
        ref_log_probs=None if reference is None else reference[rows],
    )
    return part if batch.num_targets else part.uncounted()
