"""The computation of the loss that a run minimises. The base class is next-token prediction.

An objective turns files into rows, and batches of rows into a loss. It calls the model through the
trainer, which knows about devices and precision. The trainer knows no loss by name. `losses` has
the options of each loss; the formulas are those of `ligermodels.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.loss_options import CrossEntropyOutput
from ligermodels.layers import HeadOutput
from ligermodels.losses import LossOutput, Mean, sft_loss
from ligermodels.models.base import DecoderModel
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.data import read_documents
from ligermodels.training.packing import IGNORE_INDEX, Batch, GroupedRows, PackedRows

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
        options: those of the loss.
        shown: the metric of an evaluation that tells how good the model is, and its name.
        higher_is_better: whether the model is better if that metric is higher.
        evaluates_loss: whether an evaluation measures the loss.
        rows_per_item: how many rows of the model one item of the data makes.
        expert_counts: how many tokens of the step chose each expert, if the trainer has counted.
    """

    shown = ("eval_perplexity", "perplexity")
    higher_is_better = False
    evaluates_loss = True
    rows_per_item = 1
    expert_counts: Tensor | None = None
    _noise: Any = None

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config
        self.options: Any = config.loss

    def open(self, tokenizer: Tokenizer) -> None:
        """Find what the objective needs beside the model, before any data are read.

        Raises:
            ConfigError: something is missing, or cannot be used with these tokens.
        """

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return the items of data files.

        Raises:
            DataError: a file or a line is wrong.
        """
        data = self.config.data
        return read_documents(files, tokenizer, separator=data.separator, columns=data.names)

    def rows(self, sources: Sequence[Sequence[Any]]) -> Rows:
        """Return the rows from which batches are made.

        Args: sources: the items of each source whose rows are mixed by weights, often of one.
        Raises:
            DataError: nothing is left to train on.
        """
        ranks = self.config.parallel.context_parallel  # which cut a row into two chunks each
        return PackedRows(sources, self.config.data.seq_len, 1 if ranks == 1 else 2 * ranks)

    def load(self, model: DecoderModel) -> int:
        """Load what the run needs beside the model, which has its first weights.

        Returns: how many bytes on the model's device it takes.
        """
        return 0

    def hashes(self) -> dict[str, str]:
        """Return a hash of what the run reads beside its model, by the option. Rank 0 calls it."""
        return {}

    def module(self, model: DecoderModel) -> nn.Module:
        """Return what is trained and called with batches: the model, or a module that has it."""
        if alpha := getattr(self.options, "neftune_noise_alpha", None):
            hook = partial(_add_noise, alpha)
            self._noise = model.embed_tokens.register_forward_hook(hook)
        return model

    def end(self) -> None:
        """Undo what `module` has done to the model itself, after the last step."""
        if self._noise is not None:
            self._noise.remove()

    def planned_step(self, trained: nn.Module) -> nn.Module:
        """Return what a step runs forward, for the memory plan: `module`, or one that has it."""
        return trained

    def export(self, folder: Path) -> None:
        """Write what belongs to the model into the folder that it was exported to."""

    def prepare(self, model: DecoderModel, call: Call, rows: Sequence[Rows], folder: Path) -> None:
        """Do what must be done before the first step, with the weights that the run starts from.

        Args: rows: all rows of the run; folder: a place for files.
        """

    def largest_batch(self, rows: Sequence[Rows]) -> tuple[int, int]:
        """Return the most rows of a forward pass, and their length, for the memory plan."""
        width = max(each.width for each in rows)
        return self.batch_size * self.rows_per_item, width

    @property
    def batches_per_step(self) -> int:
        """The number of batches of the data that a step reads."""
        return self.config.schedule.gradient_accumulation_steps

    @property
    def batch_size(self) -> int:
        """The number of items of the data in a batch."""
        return self.config.schedule.batch_size

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
        kind = getattr(self.config.loss, "loss_type", "nll")
        if kind == "nll":
            smoothing = getattr(self.options, "label_smoothing", 0.0)
            output = call(batch, normalizer=normalizer, label_smoothing=smoothing)
            return LossOutput(output.loss, {})
        targets = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        ends = F.pad(batch.position_ids[:, 1:] == 0, (0, 1), value=True)
        mask = (targets != IGNORE_INDEX) & ~ends

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
        if self.config.model.compile or self.config.parallel.context_parallel > 1:
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
                batch.chosen(order),
                loss_function=of_neighbours,
                group_size=group_size if divisible else len(order),
                return_token_stats=stats,
            )
            loss = out.loss
        if out.auxiliary_loss is not None:
            # With the counts of the step, it is a part already.
            share = share if self.expert_counts is None else 1.0
            loss = loss + share * out.auxiliary_loss
        return LossOutput(loss, metrics)


def log_probs_of(out: HeadOutput | CrossEntropyOutput) -> Tensor:
    """Return the log-probabilities of an output that was made with reduction "none"."""
    return 0.0 - out.loss


def _add_noise(alpha: float, module: nn.Module, _: Any, embeddings: Tensor) -> Tensor:
    """Return embeddings (batch, seq, hidden) with the noise of NEFTune, in training alone."""
    if not (module.training and torch.is_grad_enabled()):
        return embeddings
    most = alpha / math.sqrt(embeddings.shape[1] * embeddings.shape[2])
    return embeddings + torch.empty_like(embeddings).uniform_(-most, most)
