"""The steps of a training run: schedule, optimizer, gradient accumulation and evaluation.

A step's loss is a sum over all its micro-batches, divided by a number that counts all of them: the
valid targets, for example. One big batch gives the same loss, however the targets are spread over
the micro-batches, and the micro-batches over ranks. What the loss is, and what is counted, says an
`Objective`. A step depends only on the weights, the optimizer's state, the seed and the step's
number. A checkpoint therefore holds only the weights and the optimizer's state.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ligermodels import float8
from ligermodels.adapters import LoraLinear
from ligermodels.errors import LigerError, SaveError
from ligermodels.layers import Attention, Experts, HeadOutput, RotaryEmbedding, Routing
from ligermodels.layers.fusion import is_sharded
from ligermodels.losses import LossOutput, Mean
from ligermodels.memory.rates import peak_flops
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import reshard, splits_of
from ligermodels.parallel.shard import clip_grad_norm_
from ligermodels.progress import say, stage, track
from ligermodels.ranks import error_on_all_ranks, from_rank_0, num_ranks, rank
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.objectives import Objective, Rows
from ligermodels.training.optimizers import decoder_of, make_optimizer, set_learning_rate
from ligermodels.training.packing import IGNORE_INDEX, Batch, GroupedRows, mixed_order, row_order
from ligermodels.training.processes import (
    average_gradients,
    averaged,
    num_row_ranks,
    partition,
    share_scales,
    summed,
    summed_output,
)
from ligermodels.training.run_dir import Metrics
from ligermodels.training.schedules import learning_rate


def takes_starts(trained: torch.nn.Module, config: FinetuneConfig) -> bool:
    """Whether a run tells its model the starts of documents and the length of the longest one.

    On a GPU, attention then takes a kernel that need not be compiled. A module that has the model
    may read positions; torch.compile would compile again for each length.
    """
    is_whole = config.parallel.context_parallel == 1
    return decoder_of(trained) is trained and is_whole and not config.model.compile


def needs_positions(model: torch.nn.Module) -> bool:
    """Whether a model has to be told of padding: it changes the outputs of the tokens before it.

    So it is if attention is not causal, or if the frequencies of a rope depend on the row's length.
    A module that has the model may also ask: its `forward` has position_ids without a default.
    """
    asked = signature(model.forward).parameters.get("position_ids")
    return (asked is not None and asked.default is Parameter.empty) or any(
        (isinstance(x, RotaryEmbedding) and x.rope_type in ("dynamic", "longrope"))
        or (isinstance(x, Attention) and not x.causal)
        for x in model.modules()
    )


def perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats. A loss above 700 counts as 700: no overflow."""
    return math.exp(min(loss, 700.0))


def shown_perplexity(value: float) -> str:
    """Return a perplexity as text. One that only a broken model has is not written out."""
    return f"{value:.3f}" if value < 1e6 else f"{value:.1e}"


@dataclass(eq=False)
class Trainer:
    """The model (or a module that has it), the optimizer and the rows of one run.

    `objective` says what the run minimises. `ranks` is the number of processes that the run was
    started with, by default of those that run now: a step has so many times the batches of the
    objective, and the ranks that run now share them out. `casts_once` is whether float8 linears
    keep their casts of the weights for all batches of a step. `run_dir` and `checkpoints` are those
    of a run, for `restore`, `train` and `save`.
    """

    model: torch.nn.Module
    config: FinetuneConfig
    rows: Rows
    eval_rows: Rows | None
    device: torch.device
    objective: Objective
    ranks: int | None = None
    casts_once: bool = True
    run_dir: Any = None
    checkpoints: Any = None

    def __post_init__(self) -> None:
        options, schedule = self.config.model, self.config.schedule
        self.precision = options.precision or "float32"
        self.is_sharded = any(map(is_sharded, self.model.parameters()))
        # The layers of a sharded model are compiled before they are sharded.
        compiles = options.compile and not self.is_sharded
        self.forward = torch.compile(self.model) if compiles else self.model
        self.optimizer = make_optimizer(self.model, self.config.optimizer)
        self.flops = StepFlops.of(decoder_of(self.model))
        on_gpu = self.device.type == "cuda" and self.precision != "float32"
        self.peak_flops = peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None
        self.batches_per_step = (self.ranks or num_row_ranks()) * self.objective.batches_per_step
        per_step = self.objective.batch_size * self.batches_per_step
        steps = schedule.num_train_epochs * len(self.rows) / per_step
        self.total_steps = schedule.max_steps or max(1, math.ceil(steps))
        self.planned_steps = self.total_steps  # a run may end early
        self.eval_steps = schedule.eval_steps or max(1, math.ceil(self.total_steps / 5))
        decoder = decoder_of(self.model)
        self.needs_positions = needs_positions(self.model)
        self._routes = (
            decoder is self.model
            and not self.config.loss.classifies
            and any(isinstance(each, Experts) for each in decoder.modules())
        )
        self._routings: list[Routing] = []  # of the batches of a step
        self.done = 0
        self._saved = 0  # the step of the last checkpoint
        self._between_steps = True
        self._evaluated: dict[int, float] = {}  # the shown metric after each step that has it
        self._waiting: list[dict[str, float | Tensor]] = []  # steps that are not logged yet
        lengths = None
        if schedule.group_by_length and isinstance(self.rows, GroupedRows):
            lengths = np.array([*map(len, self.rows.groups)])
        self._row: Callable[[int], int] = row_order(
            len(self.rows), schedule.seed, lengths=lengths, near=per_step
        )
        if weights := self.config.data.data_weights:
            number = self.total_steps * per_step
            self._row = mixed_order(self.rows.sources, weights, schedule.seed, number)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a forward pass. Sharded weights are gathered in bf16."""
        mixed = self.precision == "bf16-mixed" and not self.is_sharded
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed)

    def head_options(self, batch: Batch) -> dict[str, Any]:
        """Return options that make the head skip rows without a target, if that saves time."""
        few = batch.num_targets < 0.9 * batch.labels.numel()
        # torch.compile would trace the model again for every new number of targets.
        if few and batch.num_targets and not self.config.model.compile:
            return {"skip_ignored": True, "max_valid": batch.num_targets}
        return {}

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's batches of a step, on the CPU. All ranks have as many."""
        size, count = self.objective.batch_size, self.batches_per_step
        first = step * size * count
        return [
            self._batch(self.rows, map(self._row, range(at, at + size)), is_extra)
            for at, is_extra in partition(range(first, first + size * count, size))
        ]

    def step(self, step: int, batches: list[Batch]) -> dict[str, float | Tensor]:
        """Run one optimizer step on the batches of the data that `micro_batches` returns.

        Returns: the loss, the learning rate, the metrics and so on, by name: numbers, and tensors
            on the device. Those of all ranks, and "flops" besides.
        """
        config = self.config
        # The step determines the seed, so a checkpoint need not hold a generator's state.
        torch.manual_seed((config.schedule.seed * 1_000_003 + step) % 2**63)
        self.model.train()
        batches, metrics = self.objective.begin(self.call, batches, shared=True)
        self.objective.expert_counts = self._expert_counts(batches)
        # The gradients of ranks are averaged, not summed.
        normalizers = self._normalizers(batches, shares=num_row_ranks())
        loss = torch.zeros((), device=self.device)
        # The casts of frozen weights stay for the next step, if the memory was planned for them.
        planned = not config.memory.activation_checkpointing and decoder_of(self.model).memory_plan
        stay = config.adapter.lora_r and planned
        casts_once = self.casts_once and (len(batches) > 1 or stay)
        with float8.weights_cast_once(self.model) if casts_once else nullcontext():
            for batch in batches:
                part, found = self._loss(batch, normalizers)
                part.backward()
                loss += part.detach()
                metrics = _sums(metrics, found)
        share_scales(self.model)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not self.is_sharded:
            average_gradients(parameters)
        limit = config.optimizer.max_grad_norm or math.inf
        if self.model is decoder_of(self.model) and splits_of(self.model):
            norm = clip_grad_norm_(self.model, limit)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if is_sharded(norm):
            norm = norm.full_tensor()  # type: ignore[attr-defined]
        loss, metrics = summed_output(loss, metrics)
        loss = loss / num_row_ranks()
        rate = learning_rate(config.schedule, step, self.total_steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        counts = {
            "tokens": sum(batch.num_tokens for batch in batches),
            "targets": sum(batch.num_targets for batch in batches),
            "flops": sum(map(self.flops.count, batches)),
        }
        made: dict[str, Any] = {"loss": loss, "learning_rate": rate, "grad_norm": norm}
        return {**made, **_values(metrics), **self._loads(), **summed(counts)}

    @torch.no_grad()
    def _expert_counts(self, batches: list[Batch]) -> Tensor | None:
        """Return the mean over ranks of how many tokens of a step chose each expert of a layer.

        A forward of the layers counts them. None is returned if no loss needs them, or if the only
        batch of a step counts for itself, in which a sharded model adds up the ranks.
        """
        alone = len(batches) == 1 and (self.is_sharded or num_ranks() == 1)
        extras = self.batches_per_step % num_row_ranks()  # which count for nothing
        if not self._routes or not any(decoder_of(self.model).router_losses):
            return None
        if alone and not extras:
            return None
        counts = []
        for batch in batches:
            with self.autocast():
                _, routing = self.forward(
                    batch.input_ids.to(self.device), **self._documents(batch), return_routing=True
                )
            counts.append(routing.counts * bool(batch.num_targets))
        return averaged(torch.stack(counts).sum(0))

    def _loads(self) -> dict[str, Any]:
        """Return metrics of the routers in a step: {} for a model without experts.

        The load of an expert is its number of tokens over the mean of its layer.
        """
        if not self._routings:
            return {}
        counts = averaged(torch.stack([each.counts for each in self._routings]).sum(0))
        entropy = averaged(torch.stack([each.entropy for each in self._routings]).mean())
        self._routings.clear()
        load = counts / counts.mean(-1, keepdim=True).clamp_min(1)
        found = {"expert_load_max": load.max(), "expert_load_min": load.min()}
        return {**found, "router_entropy": entropy, "dropped_tokens": 0}

    def call(
        self, batch: Batch, *, model: torch.nn.Module | None = None, **options: Any
    ) -> HeadOutput:
        """Run a model, by default the trained one, on a batch.

        Args: options: those of the head; a model with another head gets labels=None.
        """
        skipping = {} if "labels" in options else self.head_options(batch)
        inputs = {"labels": batch.labels.to(self.device)} | self._documents(batch)
        if "loss_function" in options:  # With a bound, it costs a fourth matrix product.
            skipping.pop("max_valid", None)
        trains = model is None and self._routes and torch.is_grad_enabled()
        if trains:
            options |= {"return_routing": True, "expert_counts": self.objective.expert_counts}
        with self.autocast():
            out: HeadOutput = (model or self.forward)(
                batch.input_ids.to(self.device), **(inputs | options), **skipping
            )
        if trains and out.routing is not None:
            self._routings.append(out.routing)
        return out

    def _documents(self, batch: Batch) -> dict[str, Any]:
        """Return what tells the model the documents of a batch.

        Rows of one document need nothing, if the padding after it changes nothing. Attention then
        takes the kernel for plain causal rows, which is faster and need not be compiled.
        """
        if not (batch.is_packed or self.needs_positions):
            return {}
        if batch.cu_seqlens is None or not takes_starts(self.model, self.config):
            return {"position_ids": batch.position_ids.to(self.device)}
        return {"cu_seqlens": batch.cu_seqlens.to(self.device), "max_seqlen": batch.max_seqlen}

    def _batch(self, rows: Rows, indices: Iterable[int], is_extra: bool) -> Batch:
        """Return the rows with these indices, which count for nothing if the batch is an extra."""
        batch = rows.batch(indices)
        return batch.uncounted() if is_extra else batch

    def _loss(self, batch: Batch, normalizers: dict[str, Tensor]) -> LossOutput:
        """Return the loss of a batch and its metrics: zeros for one that counts for nothing."""
        # A loss reads the masks of a batch in many parts, so they are moved once and not by part.
        loss, metrics = self.objective.loss(self.call, batch.to(self.device), **normalizers)
        if batch.num_targets:
            return LossOutput(loss, metrics)
        zeros = {k: Mean(0 * mean.total, 0 * mean.count) for k, mean in metrics.items()}
        return LossOutput(0 * loss, zeros)

    def _normalizers(self, batches: Iterable[Batch], shares: int = 1) -> dict[str, Tensor]:
        """Return the sums of what the objective counts in the batches of all ranks, by `shares`."""
        total: Counter[str] = Counter()
        for batch in batches:
            counts = self.objective.counts(batch)
            total.update(counts if batch.num_targets else dict.fromkeys(counts, 0))
        # torch.compile would compile again for every new Python number, so these are tensors.
        return {k: torch.tensor(n / shares, device=self.device) for k, n in summed(total).items()}

    @torch.no_grad()
    def evaluate(self, check: Callable[[], None] = lambda: None) -> Metrics:
        """Return the loss and the metrics on the held-out rows. The loss is summed in float64.

        Args: check is called before each batch.
        """
        assert self.eval_rows is not None
        self.model.eval()
        self.objective.expert_counts = None  # those of the last step
        torch.manual_seed(self.config.schedule.seed)  # an objective may sample
        number = min(len(self.eval_rows), self.config.data.max_eval_rows or len(self.eval_rows))
        size = self.objective.batch_size
        chunks = [range(at, min(number, at + size)) for at in range(0, number, size)]
        mine = partition(chunks)
        normalizers: dict[str, Tensor] = {}
        if with_loss := self.objective.evaluates_loss:
            normalizers = self._normalizers(self._batch(self.eval_rows, *each) for each in mine)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        metrics: dict[str, Mean] = {}
        targets = 0
        for each in track(mine, "evaluating", len(mine)):
            check()
            batch = self._batch(self.eval_rows, *each)
            batches, found = self.objective.begin(self.call, [batch])
            metrics = _sums(metrics, found)
            targets += sum(batch.num_targets for batch in batches)
            for batch in batches if with_loss else ():
                part, found = self._loss(batch, normalizers)
                total += part.double()
                metrics = _sums(metrics, found)
        reshard(self.model)
        total, metrics = summed_output(total, metrics)
        targets = summed({"targets": targets})["targets"]
        measured = {"eval_loss": float(total)} if with_loss else {}
        measured |= {f"eval_{k}": float(value) for k, value in _values(metrics).items()}
        if self.objective.shown[0] == "eval_perplexity":
            measured["eval_perplexity"] = perplexity(measured["eval_loss"])
        return {**measured, "targets": targets}

    def restore(self) -> int:
        """Go on from the newest checkpoint, if there is one, and return its step, or 0.

        Raises:
            CheckpointError: it cannot be resumed from.
        """
        self.done = self._saved = (
            from_rank_0(self.checkpoints.latest() if rank() == 0 else None) or 0
        )
        if self.done:
            self.checkpoints.load(self.done, self.model, self.optimizer)
        return self.done

    @property
    def best(self) -> int | None:
        """The step of the best evaluation after the first step, the first of equal ones."""
        return self._best_from(1)

    @property
    def has_helped(self) -> bool:
        """Whether an evaluation is better than that before the first step, or there is none."""
        return self._best_from(0) != 0

    def _best_from(self, first: int) -> int | None:
        sign = -1 if self.objective.higher_is_better else 1
        found = {i: sign * x for i, x in self._evaluated.items() if first <= i <= self.done}
        return min(found, key=lambda step: (found[step], step), default=None)

    def _is_at_end(self) -> bool:
        """Return whether the last step is done, or no evaluation of late was better."""
        patience, best = self.config.schedule.early_stopping_patience, self.best
        if patience is not None and best is not None:
            since = [step for step in self._evaluated if best < step <= self.done]
            if len(since) >= patience:
                self.total_steps = self.done
        return self.done == self.total_steps

    def _prune(self) -> None:
        output = self.config.output
        if rank() == 0:
            self.checkpoints.prune(output.save_total_limit, self.best if output.keep_best else None)

    def train(
        self,
        *,
        check: Callable[[], None] = lambda: None,
        sample: Callable[[int], Metrics] = lambda step: {},
        after_save: Callable[[int], None] = lambda step: None,
        progress: bool = True,
    ) -> None:
        """Run the remaining steps. Log, evaluate and write checkpoints on the way.

        Args: check is called between two steps and two batches of an evaluation, and may raise to
            stop the run. Afterwards `save` writes a checkpoint from which a resumed run goes on as
            if it had not been stopped. sample is called with the step at each evaluation, and
            returns more metrics; after_save with that of each checkpoint.
        Raises:
            CheckpointError: the metrics cannot be read.
            LigerError: a loss or a weight is no longer finite.
            SaveError: the disk is full, for example.
        """
        with error_on_all_ranks():
            logged = self.run_dir.metrics.cut(self.done or -1) if rank() == 0 else []
        key, output = self.objective.shown[0], self.config.output
        self._evaluated = from_rank_0({e["step"]: e[key] for e in logged if key in e})
        self._prune()
        with stage("training", self.total_steps, done=self.done, shows=progress) as advance:
            while True:
                # A run that was interrupted before or in an evaluation has not logged it.
                if self._is_due(self.eval_steps) and self.done not in self._evaluated:
                    self._evaluate(check, sample)
                keeps = output.keep_best and self.done == self.best
                at_end = self._is_at_end()
                if keeps or self._is_due(output.save_steps):
                    if self.save():
                        after_save(self.done)
                if at_end:
                    return
                check()
                self._between_steps = False
                started = time.perf_counter()
                made = self.step(self.done, self.micro_batches(self.done))
                self.done += 1
                seconds = time.perf_counter() - started
                self._waiting.append({"step": self.done, **made, "seconds": seconds})
                often = self.eval_steps, output.save_steps, output.logging_steps
                if any(map(self._is_due, often)):
                    self._log(started, advance)
                self._between_steps = True

    def save(self) -> bool:
        """Write a checkpoint of the steps that are done, and return whether it was missing.

        This does nothing if a second Ctrl-C has broken off a step.
        """
        if not self._between_steps:
            return False
        reshard(self.model)  # an evaluation that was broken off has left gathered weights
        if self._waiting:
            self._log(time.perf_counter())
        if self.done == self._saved:
            return False
        with error_on_all_ranks(SaveError):
            if rank() == 0:
                self.run_dir.metrics.sync()
        try:
            self.checkpoints.save(self.done, self.model, self.optimizer)
        except SaveError:
            self._prune()  # A part of a checkpoint would keep the disk full.
            raise
        self._saved = self.done
        self._prune()
        return True

    def _is_due(self, every: int) -> bool:
        """Return whether something that is done after so many steps, and the last, is due now."""
        return bool(every) and (self.done == self.total_steps or self.done % every == 0)

    def _evaluate(self, check: Callable[[], None], sample: Callable[[int], Metrics]) -> None:
        if self.eval_rows is None:
            if found := sample(self.done):
                self.run_dir.log({"step": self.done, **found})
            return
        found = self.evaluate(check)
        key, name = self.objective.shown
        if odd := next((k for k in found if not math.isfinite(found[k])), None):
            label = "held-out loss" if odd == "eval_loss" else odd
            kept = self.checkpoints.said_latest()
            raise LigerError(f"step {self.done}: the {label} is {found[odd]}; {kept}")
        self._evaluated[self.done] = found[key]
        self.run_dir.log({"step": self.done, **found, **sample(self.done)})
        shown = shown_perplexity(found[key]) if name == "perplexity" else f"{found[key]:.4f}"
        told = [f"held-out loss {found['eval_loss']:.4f}"] if "eval_loss" in found else []
        told += [f"{name} {shown}"] if key != "eval_loss" else []
        say(f"step {self.done}: {', '.join(told)}")

    def _log(self, started: float, advance: Callable[[int, str], None] | None = None) -> None:
        """Read the losses of the waiting steps from the device, and log the steps.

        Reading waits for the device. The last step began at `started`, and its time includes that
        wait.
        """
        entries: list[Metrics] = [
            {key: v.item() if isinstance(v, Tensor) else v for key, v in step.items()}
            for step in self._waiting
        ]
        self._waiting.clear()
        entries[-1]["seconds"] = time.perf_counter() - started
        # The seconds of the other steps do not include what the device has computed since.
        seconds = max(sum(entry["seconds"] for entry in entries), 1e-9)
        speed = {"tokens_per_second": sum(entry["tokens"] for entry in entries) / seconds}
        flops = sum(entry.pop("flops") for entry in entries)
        if self.peak_flops is not None:
            speed["mfu"] = flops / seconds / (self.peak_flops * num_ranks())
        entries[-1] |= speed
        for entry in entries:
            if not math.isfinite(entry["loss"]) or not math.isfinite(entry["grad_norm"]):
                raise LigerError(
                    f"step {entry['step']}: the loss is {entry['loss']} and the gradient norm is "
                    f"{entry['grad_norm']}; {self.checkpoints.said_latest()}; try a lower learning "
                    "rate or a longer warm-up"
                )
            self.run_dir.log(entry)
        if advance is not None:
            mfu = f"  MFU {speed['mfu']:.1%}" if "mfu" in speed else ""
            shown = f"loss {entries[-1]['loss']:.4f}  {speed['tokens_per_second']:,.0f} tokens/s"
            advance(len(entries), shown + mfu)


def _values(metrics: dict[str, Mean]) -> dict[str, Tensor]:
    """Return each metric's mean. KTO's margin is the difference of two, 0 if one has no terms."""
    values = {name: mean.value for name, mean in metrics.items()}
    if "rewards/rejected" in metrics and "rewards/margins" not in metrics:
        chosen, rejected = (metrics[f"rewards/{kind}"] for kind in ("chosen", "rejected"))
        both = (chosen.count > 0) & (rejected.count > 0)
        values["rewards/margins"] = torch.where(both, chosen.value - rejected.value, 0.0)
    return values


def _sums(metrics: dict[str, Mean], more: dict[str, Mean]) -> dict[str, Mean]:
    """Return the means over two sets of things."""
    return {**metrics, **{k: metrics[k] + v if k in metrics else v for k, v in more.items()}}


@dataclass(frozen=True)
class StepFlops:
    """Operations of forward and backward: for each token, each target, and each pair of tokens.

    They are counted for the share of the GPU's peak (MFU) as in PaLM (Chowdhery et al. 2022,
    appendix B): two for each weight and token in forward, and as many for each gradient. What a run
    computes again in backward does not count, and what it does not need does not either: padding,
    pairs of tokens that the mask hides, logits of tokens without a target, and the gradients of
    frozen weights.

    Attributes:
        per_token, per_target: of the linears of the layers, and of the head.
        pairs: of the attention of each layer, for a query and a key, and how far the layer looks
            back, in tokens; None is all the way.
    """

    per_token: int
    per_target: int
    pairs: tuple[tuple[int, int | None], ...]

    @classmethod
    def of(cls, model: DecoderModel) -> StepFlops:
        """Count the operations of a model, some of whose parameters may be frozen."""
        per_token = 0.0
        share: dict[nn.Module, float] = {}  # the part of an expert's weights that a token meets
        module: Any
        for module in model.layers.modules():
            if isinstance(module, Experts):
                own = module.router.top_k / module.router.num_experts
                share |= dict.fromkeys(module.modules(), own)
                weights = (module.gate_up_proj, module.down_proj)
                plain = [x for x in weights if isinstance(x, Tensor)]
                per_token += own * sum((6 if x.requires_grad else 4) * x.numel() for x in plain)
            elif isinstance(module, LoraLinear):
                factors = module.lora_a.numel() + module.lora_b.numel()
                per_token += 6 * factors * share.get(module, 1.0)
            elif hasattr(module, "in_features"):  # a linear, perhaps one of few bits
                weight = getattr(module, "weight", None)
                learns = isinstance(weight, nn.Parameter) and weight.requires_grad
                size = module.in_features * module.out_features * share.get(module, 1.0)
                per_token += (6 if learns else 4) * size
        head: Any = getattr(model.head, "weight", None)  # also if it is tied to the embedding
        per_target = 0 if head is None else (6 if head.requires_grad else 4) * head.numel()
        found = (x for x in model.layers.modules() if isinstance(x, Attention))
        pairs = tuple((12 * x.num_heads * x.head_dim, x.sliding_window) for x in found)
        return cls(int(per_token), per_target, pairs)

    def count(self, batch: Batch) -> int:
        """Return the operations of a batch."""
        if not batch.num_tokens:
            return 0
        document = (batch.position_ids.flatten() == 0).cumsum(0) - 1
        targets = (batch.labels.flatten() != IGNORE_INDEX).double()
        # Padding is a document that has no target.
        counts = (torch.bincount(document, targets) > 0)[document]
        seen = batch.position_ids.flatten()[counts] + 1  # by each token, without a window
        pairs = sum(
            each * int(seen.clamp(max=window or len(document)).sum()) for each, window in self.pairs
        )
        linears = self.per_token * batch.num_tokens + self.per_target * batch.num_targets
        return linears + pairs
