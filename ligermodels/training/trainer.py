"""The steps of a training run: schedule, optimizer, gradient accumulation, evaluation.

A step's loss is the sum over all valid targets of all its micro-batches, divided by their number:
what one big batch would give, however the targets are spread. Nothing a step does depends on
anything but the weights, the optimizer's state, the seed and the step's number, so a checkpoint
holds the first two and is enough.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ligermodels.errors import LigerError
from ligermodels.training.packing import Batch, PackedRows, row_order
from ligermodels.training.run_dir import RunFolder, load_checkpoint

if TYPE_CHECKING:
    from ligermodels.training.finetune import FinetuneConfig


def learning_rate(step: int, total: int, peak: float, warmup: int, last_ratio: float) -> float:
    """The rate of the step with this number, from 0: linear warm-up, then half a cosine.

    It is `peak` at the end of the warm-up and `last_ratio * peak` in the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup + 1) / max(1, total - warmup)
    return peak * (last_ratio + (1 - last_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, norm weights and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def number_of_steps(config: FinetuneConfig, num_rows: int) -> int:
    """How many optimizer steps the config asks for with so many rows."""
    if config.steps is not None:
        return config.steps
    return max(
        1,
        math.ceil(
            num_rows * config.epochs / (config.batch_size * config.gradient_accumulation_steps)
        ),
    )


class Trainer:
    """Model, optimizer and rows of one run.

    `precision` is "float32", "bf16-mixed" (autocast over float32 weights) or "bf16".
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: FinetuneConfig,
        rows: PackedRows,
        eval_rows: PackedRows | None,
        device: torch.device,
        precision: str,
    ):
        self.model = model
        self.config = config
        self.rows = rows
        self.eval_rows = eval_rows
        self.device = device
        self.precision = precision
        self.forward = torch.compile(model) if config.compile else model
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, config.weight_decay),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            fused=True,
        )
        self.total_steps = number_of_steps(config, len(rows))
        warmup = config.warmup_steps
        self.warmup = round(0.03 * self.total_steps) if warmup is None else warmup
        self.eval_every = config.eval_every or max(1, math.ceil(self.total_steps / 5))
        self._row = row_order(len(rows), config.seed)

    def autocast(self) -> AbstractContextManager:
        """What a forward pass runs under."""
        if self.precision != "bf16-mixed":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def head_options(self, batch: Batch) -> dict[str, Any]:
        """Options with which the head spares the rows of prompts and padding, where that pays."""
        few = batch.num_targets < 0.9 * batch.labels.numel()
        # Compiled, the model would be traced anew for every other number of targets.
        if few and not self.config.compile:
            return {"skip_ignored": True, "max_valid": batch.num_targets}
        return {}

    def micro_batches(self, step: int) -> list[Batch]:
        """The batches of a step, on the CPU."""
        size, count = self.config.batch_size, self.config.gradient_accumulation_steps
        first = step * size * count
        indices = [self._row(i) for i in range(first, first + size * count)]
        return [self.rows.batch(indices[i * size : (i + 1) * size]) for i in range(count)]

    def step(self, step: int, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, float]:
        """One optimizer step on `batches`: (loss, gradient norm), on the device, and the rate."""
        config = self.config
        # Dropout's numbers follow from the step, so there is no generator state to carry over.
        torch.manual_seed((config.seed * 1_000_003 + step) % 2**63)
        self.model.train()
        # A tensor, because torch.compile would compile anew for every other number.
        targets = sum(batch.num_targets for batch in batches)
        normalizer = torch.tensor(float(targets), device=self.device)
        loss = torch.zeros((), device=self.device)
        for batch in batches:
            batch = batch.to(self.device)
            with self.autocast():
                part = self.forward(
                    batch.input_ids,
                    labels=batch.labels,
                    position_ids=batch.position_ids,
                    normalizer=normalizer,
                    **self.head_options(batch),
                ).loss
            part.backward()
            loss += part.detach()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        limit = config.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        rate = learning_rate(
            step, self.total_steps, config.learning_rate, self.warmup, config.min_lr_ratio
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm, rate

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Loss per target and perplexity over the held-out rows, summed in float64."""
        assert self.eval_rows is not None
        self.model.eval()
        number = min(len(self.eval_rows), self.config.max_eval_rows or len(self.eval_rows))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        targets = 0
        for start in range(0, number, self.config.batch_size):
            stop = min(number, start + self.config.batch_size)
            batch = self.eval_rows.batch(range(start, stop)).to(self.device)
            with self.autocast():
                part = self.forward(
                    batch.input_ids,
                    labels=batch.labels,
                    position_ids=batch.position_ids,
                    reduction="sum",
                    **self.head_options(batch),
                ).loss
            total += part.double()
            targets += batch.num_targets
        loss = float(total) / targets
        return {
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700.0)),
            "targets": targets,
        }

    def train(self, folder: RunFolder, *, progress: bool = True) -> None:
        """Take every step that is left, logging, evaluating and checkpointing on the way."""
        config = self.config
        checkpoint = folder.latest_checkpoint()
        done = load_checkpoint(checkpoint, self.model, self.optimizer) if checkpoint else 0
        folder.prune(config.save_total_limit)
        folder.cut_metrics(done if checkpoint else -1)
        with _Bar(self.total_steps, done, progress) as bar:
            if checkpoint is None:
                self._evaluate(folder, 0, bar)
            waiting: list[dict[str, Any]] = []
            for step in range(done, self.total_steps):
                started = time.perf_counter()
                batches = self.micro_batches(step)
                loss, norm, rate = self.step(step, batches)
                last = step + 1 == self.total_steps
                evaluates = last or (step + 1) % self.eval_every == 0
                saves = config.save_every and (last or (step + 1) % config.save_every == 0)
                waiting.append(
                    {
                        "step": step + 1,
                        "loss": loss,
                        "learning_rate": rate,
                        "grad_norm": norm,
                        "tokens": sum(batch.num_tokens for batch in batches),
                        "targets": sum(batch.num_targets for batch in batches),
                        "seconds": time.perf_counter() - started,
                    }
                )
                if evaluates or saves or (step + 1) % config.log_every == 0:
                    _log(folder, waiting, started, bar)
                if evaluates:
                    self._evaluate(folder, step + 1, bar)
                if saves:
                    folder.save_checkpoint(
                        step + 1, self.model, self.optimizer, config.save_total_limit
                    )

    def _evaluate(self, folder: RunFolder, step: int, bar: _Bar) -> None:
        if self.eval_rows is None:
            return
        found = self.evaluate()
        folder.log({"step": step, **found})
        bar.write(
            f"step {step}: held-out loss {found['eval_loss']:.4f}, "
            f"perplexity {found['eval_perplexity']:.3f}"
        )


def _log(folder: RunFolder, waiting: list[dict[str, Any]], started: float, bar: _Bar) -> None:
    """Write the steps that wait for their numbers: reading a loss waits for the device."""
    for entry in waiting:
        entry["loss"], entry["grad_norm"] = float(entry["loss"]), float(entry["grad_norm"])
    waiting[-1]["seconds"] = time.perf_counter() - started
    for entry in waiting:
        if not math.isfinite(entry["loss"]) or not math.isfinite(entry["grad_norm"]):
            raise LigerError(
                f"step {entry['step']}: the loss is {entry['loss']} and the gradient norm "
                f"{entry['grad_norm']}; try a lower learning rate or a longer warm-up"
            )
        folder.log(entry)
    bar.update(waiting)
    waiting.clear()


class _Bar:
    """The progress bar on stderr: steps, loss, tokens per second. Silent when not shown."""

    def __init__(self, total: int, done: int, shown: bool):
        from tqdm import tqdm

        # A log file gets a line now and then instead of a bar that redraws itself.
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            disable=not shown,
            mininterval=interval,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def write(self, text: str) -> None:
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def update(self, entries: list[dict[str, Any]]) -> None:
        seconds = sum(entry["seconds"] for entry in entries)
        speed = sum(entry["tokens"] for entry in entries) / max(seconds, 1e-9)
        loss = f"{entries[-1]['loss']:.4f}"
        self._bar.set_postfix({"loss": loss, "tokens/s": f"{speed:,.0f}"}, refresh=False)
        self._bar.update(len(entries))
