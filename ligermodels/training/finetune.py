"""Fine-tune a checkpoint: `finetune(FinetuneConfig(model=..., train_files=[...], output_dir=...))`.

This module runs all stages, from the options to the export. `data` and `packing` make the rows,
`trainer` runs the training steps, and `run_dir` manages the output folder.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ligermodels import __version__
from ligermodels.converters.hub import resolve
from ligermodels.errors import ConfigError, LigerError, first_line
from ligermodels.kernels.dispatch import choose
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.auto import AutoLiger
from ligermodels.models.base import DecoderModel
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.config import FREE_ON_RESUME, FinetuneConfig
from ligermodels.training.data import Document, check_files, file_hashes, read_documents
from ligermodels.training.memory import planner, summary, weight_dtype
from ligermodels.training.packing import PackedRows, hold_out
from ligermodels.training.run_dir import RunDir, plot_losses
from ligermodels.training.trainer import Trainer, perplexity


@dataclass(kw_only=True)
class FinetuneResult:
    """The result of a run. Losses are per token, in nats; perplexity is their exponential.

    `model_dir` is the folder of the export, and `model` is the trained model in the export's dtype.
    The evaluation losses are None if no data was held out.
    """

    output_dir: Path
    model_dir: Path
    steps: int
    loss: float
    eval_loss_before: float | None
    eval_loss_after: float | None
    metrics: list[dict[str, Any]] = field(repr=False)
    model: DecoderModel = field(repr=False)
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def perplexity_before(self) -> float | None:
        """Held-out perplexity of the original checkpoint."""
        return None if self.eval_loss_before is None else perplexity(self.eval_loss_before)

    @property
    def perplexity_after(self) -> float | None:
        """Held-out perplexity of the trained weights."""
        return None if self.eval_loss_after is None else perplexity(self.eval_loss_after)


def finetune(config: FinetuneConfig, *, progress: bool = True) -> FinetuneResult:
    """Train, evaluate and export as `config` says.

    With `progress`, a progress bar and notes go to stderr. The run may be killed at any moment, and
    `resume=True` continues it. On a CPU in float32, the resumed run gives the same weights bit for
    bit.

    Raises:
        DataError: a file is missing, unreadable or empty; the message names file and line.
        CheckpointError, ConfigError: the model cannot be loaded or does not support an option.
        SaveError: the output cannot be written.
        LigerError: the output folder holds another run, or the loss is no longer finite.
    """
    run_dir = RunDir(config.output_dir)
    inputs = [("model", Path(config.model))]
    inputs += [("training data", file) for file in check_files(config.train_files)]
    inputs += [("evaluation data", file) for file in check_files(config.eval_files or [])]
    run_dir.check(config.resume, config.overwrite_output_dir, inputs)
    device = pick_device(config.device)
    gpus = [device] if device.type == "cuda" else []
    # fork_rng restores the random generators of the caller.
    with run_dir.locked(), torch.random.fork_rng(devices=gpus):
        return _Run(config, run_dir, device, progress).run()


def resumed_settings(output_dir: str | Path) -> dict[str, Any]:
    """Return the options that started the run in `output_dir`, or {} if there is no run."""
    saved = RunDir(output_dir).read_settings()
    known = {each.name for each in fields(FinetuneConfig)} - {"resume", "overwrite_output_dir"}
    return {k: v for k, v in saved["settings"].items() if k in known} if saved else {}


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name. None selects a GPU if there is one, else the CPU.

    Raises:
        ConfigError: the device does not exist, or it is neither a CPU nor a GPU.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        hint = "; did you mean 'cuda'?" if name in ("gpu", "nvidia", "rocm", "hip") else ""
        raise ConfigError(f"device: must be cpu or cuda, not {name!r}{hint}")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigError(f"device: {name!r} cannot be used: {reason}") from None
    return device


class _Run:
    """The stages of one call of `finetune`: load, train and export."""

    def __init__(
        self, config: FinetuneConfig, run_dir: RunDir, device: torch.device, progress: bool
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.device = device
        self.precision = config.precision or ("bf16-mixed" if device.type == "cuda" else "float32")
        self.progress = progress
        self.notes: list[str] = []

    def run(self) -> FinetuneResult:
        config = self.config
        saved = self.run_dir.read_settings() if config.resume else None
        if saved is not None:
            self._check_settings(saved["settings"])
        source = Path(resolve(config.model, revision=config.revision))
        rows, eval_rows = self._rows(source)
        model = self._model(source, rows, eval_rows)
        self._plan_memory(model, rows, eval_rows, saved)
        trainer = Trainer(model, config, rows, eval_rows, self.device, self.precision)
        self._start(rows, trainer, saved)
        trainer.train(self.run_dir, progress=self.progress)
        return self._finish(model, trainer)

    def _check_settings(self, saved: dict[str, Any]) -> None:
        for name, value in self._settings().items():
            old = saved.get(name, value)
            if name not in FREE_ON_RESUME and old != value:
                raise LigerError(
                    f"{self.run_dir.path}: {name}: the run was started with {old!r} and cannot be "
                    f"resumed with {value!r}"
                )

    def _settings(self) -> dict[str, Any]:
        """Return the options with absolute paths: a run may be resumed from another directory."""
        settings = {**asdict(self.config), "precision": self.precision}
        for name in ("train_files", "eval_files"):
            if settings[name] is not None:
                settings[name] = [str(Path(file).resolve()) for file in settings[name]]
        if Path(self.config.model).is_dir():
            settings["model"] = str(Path(self.config.model).resolve())
        return settings

    def _rows(self, source: Path) -> tuple[PackedRows, PackedRows | None]:
        """Return the packed rows for training and for evaluation."""
        config = self.config
        tokenizer = Tokenizer.from_hf(source)
        train = read_documents(config.train_files, tokenizer, separator=config.separator)
        if config.eval_files:
            held_out = read_documents(config.eval_files, tokenizer, separator=config.separator)
        else:
            train, held_out = hold_out(train, config.eval_fraction, config.seed)
        pad = tokenizer.pad_token_id
        pad = (tokenizer.eos_token_id if pad is None else pad) or 0
        rows = self._pack("training", train, pad)
        return rows, self._pack("held-out", held_out, pad) if held_out else None

    def _pack(self, what: str, documents: list[Document], pad: int) -> PackedRows:
        seq_len = self.config.seq_len
        rows = PackedRows(documents, seq_len, pad)
        self._note(
            f"{what} data: {_count(len(documents), 'document')}, "
            f"{_count(rows.num_tokens, 'token')}, "
            f"{_count(len(rows), 'row')} of {rows.width:,} tokens"
        )
        if rows.num_truncated:
            self._note(
                f"{what} data: cut {_count(rows.num_truncated, 'example')} to {seq_len} tokens; "
                f"dropped {rows.num_dropped:,} of these because no target is left"
            )
        return rows

    def _model(self, source: Path, rows: PackedRows, eval_rows: PackedRows | None) -> DecoderModel:
        model = AutoLiger.from_hf(source, dtype=weight_dtype(self.precision), device=self.device)
        highest = max(packed.max_id for packed in (rows, eval_rows) if packed is not None)
        if highest >= model.config.vocab_size:
            raise ConfigError(
                f"{source}: vocab_size: the tokenizer makes token {highest}, but the model has "
                f"only {model.config.vocab_size} tokens; use a tokenizer that fits this model"
            )
        limit = model.config.max_position_embeddings
        if rows.width > limit:
            self._note(
                f"rows of {rows.width} tokens are longer than the model's max_position_embeddings "
                f"({limit})"
            )
        return model

    def _plan_memory(
        self,
        model: DecoderModel,
        rows: PackedRows,
        eval_rows: PackedRows | None,
        saved: dict[str, Any] | None,
    ) -> None:
        """Choose what the layers keep for backward; a resumed run keeps its plan."""
        config = self.config
        if config.activation_checkpointing:
            model.activation_checkpointing_enable()
        elif saved is not None and saved["settings"].get("memory") == config.memory:
            plan = saved.get("memory_plan")
            model.set_memory_plan(None if plan is None else MemoryPlan.from_dict(plan))
        elif (budget := self._budget()) != "off":
            accumulates = config.gradient_accumulation_steps > 1
            run = planner(model, budget, precision=self.precision, accumulates=accumulates)
            width = max(packed.width for packed in (rows, eval_rows) if packed is not None)
            plan = run.plan(config.batch_size, width)
            model.set_memory_plan(plan)
            self._note(f"memory: {summary(plan)}")

    def _budget(self) -> str:
        """Return "off", or the memory that the run may take."""
        if self.config.memory is not None:
            return self.config.memory
        # A step on a GPU is simulated with the Triton kernels.
        on_gpu = self.device.type == "cuda" and choose(self.device)[0] == "triton"
        return "auto" if on_gpu else "off"

    def _start(self, rows: PackedRows, trainer: Trainer, saved: dict[str, Any] | None) -> None:
        """Write the settings of a new run, or check that a resumed run has the same rows.

        Everything has loaded by now. A load that fails therefore leaves an older run unchanged.
        """
        where = self.run_dir.path
        facts = {"rows": rows.fingerprint(), "steps": trainer.total_steps}
        in_use = trainer.model.memory_plan
        plan = {"memory_plan": None if in_use is None else in_use.to_dict()}
        if saved is None:
            files = file_hashes(self.config.train_files)
            self.run_dir.clear()
            settings = {"settings": self._settings(), **facts, "files": files}
            self.run_dir.write_settings({**settings, **plan, "ligermodels": __version__})
        elif saved.get("rows") != facts["rows"]:
            raise LigerError(
                f"{where}: the training data is not what the run was started with: "
                + _difference(saved.get("files", {}), file_hashes(self.config.train_files))
            )
        elif saved.get("steps") != facts["steps"]:
            raise LigerError(
                f"{where}: the run was started with {saved.get('steps')} steps and cannot be "
                f"resumed with {facts['steps']}"
            )
        elif saved["settings"].get("memory") != self.config.memory:
            settings = {**saved["settings"], "memory": self.config.memory}
            self.run_dir.write_settings({**saved, "settings": settings, **plan})

    def _finish(self, model: DecoderModel, trainer: Trainer) -> FinetuneResult:
        if self.config.export_dtype is not None:
            model.to(getattr(torch, self.config.export_dtype))
        model.save_hf(self.run_dir.model_dir, max_shard_size=self.config.max_shard_size)
        metrics = self.run_dir.read_metrics()
        if not plot_losses(metrics, self.run_dir.loss_plot):
            self._note(
                "loss.png was not drawn, because matplotlib is not installed "
                "(pip install 'ligermodels[plot]')"
            )
        losses = [entry["loss"] for entry in metrics if "loss" in entry]
        evals = [entry["eval_loss"] for entry in metrics if "eval_loss" in entry]
        return FinetuneResult(
            output_dir=self.run_dir.path,
            model_dir=self.run_dir.model_dir,
            steps=trainer.total_steps,
            loss=losses[-1],
            eval_loss_before=evals[0] if evals else None,
            eval_loss_after=evals[-1] if evals else None,
            metrics=metrics,
            model=model,
            notes=self.notes,
        )

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self.progress:
            tqdm.write(text, file=sys.stderr)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _difference(then: dict[str, str], now: dict[str, str]) -> str:
    """Say which training files differ. Hashes decide, because files may have been renamed."""
    if changed := [file for file, digest in now.items() if digest not in then.values()]:
        return f"{', '.join(changed)} changed or is new"
    if gone := [file for file, digest in then.items() if digest not in now.values()]:
        return f"{', '.join(gone)} is left out"
    return (
        "the files are the same, but their order, eval_files, eval_fraction or the tokenizer "
        "changed"
    )
