"""Fine-tune a checkpoint: `finetune(FinetuneConfig(model=..., train_files=[...], output_dir=...))`.

`Run.run` has the stages of a run, from top to bottom: it loads the data and the model, trains and
exports. `data` and `packing` make the rows, `model` loads the model, `trainer` runs the training
steps, and `run_dir` manages the output folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ligermodels import __version__, float8
from ligermodels.adapters.adapted_model import adapter_of, export_adapter, merged
from ligermodels.converters.files import GENERATION_CONFIG_NAME
from ligermodels.converters.hub import ALIASES, resolve
from ligermodels.errors import (
    ConfigError,
    DataError,
    LigerError,
    SaveError,
    counted,
    first_line,
    short_repr,
)
from ligermodels.kernels.dispatch import choose
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.shard import shard
from ligermodels.progress import stage
from ligermodels.ranks import error_on_all_ranks, from_rank_0, is_distributed, rank
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training import processes, reports
from ligermodels.training.checkpoints import Checkpoints, first_not_finite
from ligermodels.training.config import FREE_ON_RESUME, NOT_KEPT, FinetuneConfig, config_text
from ligermodels.training.data import local_files, stored_documents
from ligermodels.training.model import check_same, file_hashes, load_model, planner, summary
from ligermodels.training.objectives import Objective, Rows
from ligermodels.training.optimizers import make_optimizer
from ligermodels.training.packing import hold_out
from ligermodels.training.processes import Interrupted, Interrupts, num_row_ranks
from ligermodels.training.reports import FinetuneResult
from ligermodels.training.run_dir import (
    NEW_START,
    RUN_FORMAT,
    START,
    Metrics,
    RunDir,
    fingerprint,
    plot_losses,
)
from ligermodels.training.start import has_own_start, preset_named, tokenizer_of, write_start
from ligermodels.training.trainer import Trainer, needs_positions, takes_starts


def finetune(
    config: FinetuneConfig,
    *,
    progress: bool = True,
    modules: Sequence[str] = (),
    show: Callable[[dict[str, str]], None] | None = None,
) -> FinetuneResult:
    """Train, evaluate and export as `config` says.

    With `progress`, one progress bar and notes go to stderr. The run may be killed at any moment,
    and `resume=True` continues it. SIGINT and SIGTERM save a checkpoint first, if the caller has no
    handlers of its own. On a CPU in float32, the resumed run gives the same weights bit for bit.
    `modules` are those that the command line has imported: run.yaml names them, and so does the
    command in the message of an interrupted run. Before the first step, `show` gets what the run
    will do: texts by name.

    Raises:
        DataError: a file is missing, unreadable or empty; the message names file and line.
        CheckpointError, ConfigError: the model cannot be loaded or does not support an option, or
            what a resumed run needs was changed or damaged.
        SaveError: the output cannot be written.
        LigerError: the output folder holds another run, or a loss or weight is no longer finite.
        Interrupted: SIGINT or SIGTERM came; the message says what is saved.
    """
    device = pick_device(config.model.device)
    parallel = config.parallel
    with (
        processes.process_group(device, parallel.rank_timeout, parallel.context_parallel),
        Interrupts(verbose=progress and rank() == 0) as interrupts,
    ):
        shows = show if rank() == 0 else None
        bar = progress and rank() == 0
        run = Run(config, device, bar, interrupts, modules, shows)
        # fork_rng restores the random generators of the caller.
        gpus = [device] if device.type == "cuda" else []
        try:
            with run.run_dir.locked(), torch.random.fork_rng(gpus):
                return run.run()
        except LigerError:
            raise
        except BaseException as error:
            of_gloo = type(error) is RuntimeError and "/gloo/" in str(error)
            if of_gloo or isinstance(error, dist.DistError):
                said = f"another process of the run has ended or hangs: {first_line(error)}"
                raise LigerError(said) from error
            # An interrupted library may raise something else than KeyboardInterrupt.
            if interrupts.signum is None and not isinstance(error, KeyboardInterrupt):
                raise
            raise Interrupted(run.what_is_saved(), interrupts.signum or signal.SIGINT) from error


def resumed_settings(output_dir: str | Path) -> dict[str, Any]:
    """Return the options that started the run in `output_dir`, or {} if there is no run.

    Raises:
        CheckpointError: run.json is damaged.
    """
    saved = RunDir(output_dir).read_settings()
    return saved["settings"] if saved else {}


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name. None selects a GPU if there is one, else the CPU.

    Of the GPUs, each of the processes that torchrun starts gets its own.

    Raises:
        ConfigError: the device does not exist, or it is neither a CPU nor a GPU.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):  # torch would list all that it knows
        raise ConfigError(f"device: must be cpu or cuda, not {name!r}")
    try:
        device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigError(f"device: {name!r} cannot be used: {reason}") from None
    return device


@dataclass(eq=False)
class Run:
    """One call of `finetune`.

    Attributes: began is whether run.json describes this run, and exported whether model/ does.
    """

    config: FinetuneConfig
    device: torch.device
    progress: bool
    interrupts: Interrupts
    modules: Sequence[str]
    show: Callable[[dict[str, str]], None] | None = None

    def __post_init__(self) -> None:
        config = self.config
        usual = "bf16-mixed" if self.device.type == "cuda" else "float32"
        self.precision = config.model.precision or usual
        self.config = replace(config, model=replace(config.model, precision=self.precision))
        self.run_dir = RunDir(str(config.output.output_dir))
        self.checkpoints = Checkpoints(self.run_dir.checkpoint_dir)
        self.objective = config.loss.objective(self.config)
        self.began = self.exported = False
        self.notes: list[str] = []
        experts = config.parallel.expert_parallel
        if num_row_ranks() % experts:
            raise ConfigError(
                f"expert_parallel: {experts} processes for the experts of a layer, but those with "
                f"rows of their own are {num_row_ranks()}; start a multiple of {experts} (--gpus)"
            )
        # Several processes hold a part of the model each, or the whole of one that hardly learns.
        adapts = config.adapter.lora_r is not None and experts == 1
        self.shards = is_distributed() and not adapts
        # Gathered weights are new ones for each batch.
        self.casts_once = not self.shards

    def run(self) -> FinetuneResult:
        """Prepare the run, train, and export the model; the errors are those of `finetune`."""
        if self._is_restarted():
            output = replace(self.config.output, resume=True, overwrite_output_dir=False)
            self.config = replace(self.config, output=output)
        config, output = self.config, self.config.output
        with error_on_all_ranks():
            self._check_options()
            self.train_files, self.eval_files = (
                local_files(names or [], progress=self.progress)
                for names in (config.data.train_files, config.data.eval_files)
            )
            models = str(config.model.path), getattr(config.loss, "teacher", None)
            inputs = [*filter(None, models), *self.train_files, *self.eval_files]
            self.run_dir.check(output.resume, output.overwrite_output_dir, inputs)
            saved = self.run_dir.read_settings() if output.resume else None
            self.began = saved is not None
            if saved is not None:
                self._check_settings(saved["settings"])
            openers = [] if rank() else reports.logger_openers(output.report_to or [])
            source = self._source(saved is not None)
            model = load_model(source, config, torch.device("meta"), meta=True)
            if config.optimizer.lr_factors and type(self.objective).module is Objective.module:
                make_optimizer(model, config.optimizer)  # refuses names before all that is slow
            files = {} if rank() else file_hashes(source)
            tokenizer = tokenizer_of(source, config)
            with stage("reading the data", shows=self.progress):
                rows, eval_rows = self._rows(tokenizer)
            with stage("loading the model", shows=self.progress):
                self.model = self._model(source, tokenizer, rows, eval_rows)
            sampler = reports.Sampler(output, tokenizer, self.run_dir)
        with stage("loading the model", shows=self.progress):
            if self.shards:
                self._shard(self.model)
            held = self.objective.load(self.model)
            trained = self.objective.module(self.model)
        with error_on_all_ranks():
            hashes = {} if rank() else self.objective.hashes()
        base, others = from_rank_0((files, hashes))
        self.base = source, base
        every = [each for each in (rows, eval_rows) if each is not None]
        with stage("planning the memory", shows=self.progress):
            self._plan_memory(trained, every, saved, held)
        # A run that is resumed by another number of ranks makes the same steps.
        self.ranks = num_row_ranks() if saved is None else saved["ranks"]
        objective, ranks = self.objective, self.ranks
        trainer = Trainer(
            *(trained, config, rows, eval_rows, self.device, objective, ranks),
            *(self.casts_once, self.run_dir, self.checkpoints),
        )
        with self.interrupts.held():
            with error_on_all_ranks():
                self._start(source, base, others, rows, saved)
            if has_own_start(config):
                source = self.model.source.folder = self.run_dir.path / START
                self.base = source, base
            try:
                return self._train(trainer, source, openers, sampler, every)
            except KeyboardInterrupt:
                if not self.exported:
                    trainer.save()
                raise

    def _train(
        self,
        trainer: Trainer,
        source: Path,
        openers: list[Any],
        sampler: reports.Sampler,
        rows: Sequence[Rows],
    ) -> FinetuneResult:
        """Run the steps that are left, and export the model."""
        config, started = self.config, time.monotonic()
        hours, pushes = config.schedule.max_hours, config.output.hub_strategy == "every_save"

        def check() -> None:
            is_over = hours is not None and time.monotonic() - started > 3600 * hours
            if is_over and trainer.done < trainer.total_steps:
                self.interrupts.signum = self.interrupts.signum or signal.SIGALRM
            self.interrupts.signum = processes.barrier(self.interrupts.signum)
            self.interrupts.check()

        def sample(step: int) -> Metrics:
            sampler(self.model, trainer.autocast, step)
            return reports.task_scores(self.model, source, config.data, trainer.autocast)

        with stage("preparing the loss", shows=self.progress):
            folder = self.run_dir.path / "reference"
            self.objective.prepare(self.model, trainer.call, rows, folder)
        first = trainer.restore()
        if self.show is not None:
            self.show(reports.beginning(trainer, self.model))
        with reports.logged(self.run_dir, openers, self._settings(), first):
            trainer.train(
                check=check,
                sample=sample,
                after_save=self._push_save if pushes else lambda step: None,
                progress=self.progress,
            )
        check()
        return self._finish(trainer)

    def what_is_saved(self) -> str:
        """Say what an interrupted run has left in its folder, and how to go on."""
        why = "interrupted"
        if self.interrupts.signum == signal.SIGALRM:
            why = f"max_hours: the time of {self.config.schedule.max_hours:g} hours was over"
        if self.exported:
            return f"{why} after the export; {self.run_dir.model_dir} is complete"
        if not self.began:
            return f"{why} before the run began; nothing was changed"
        words = ["ligermodels", "finetune", "--resume", "--output-dir", str(self.run_dir.path)]
        words += [word for module in self.modules for word in ("--import", module)]
        command, step = f"'{shlex.join(words)}'", self.checkpoints.latest()
        if step is None:
            return f"{why} before a step was saved; {command} starts from the beginning"
        return f"{why}; the state after step {step} is saved, and {command} goes on from there"

    def _is_restarted(self) -> bool:
        """Return whether torchrun starts this run again, which its first try had begun."""
        with error_on_all_ranks():
            restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            saved = self.run_dir.read_settings() if restarts else None
        # Processes that failed before they began a run may have found another one here.
        return from_rank_0(saved is not None and saved["launch"] == processes.launch_id())

    def _check_options(self) -> None:
        if self.config.output.push_to_hub is not None:
            reports.check_login()
        if self.config.data.eval_tasks:
            reports.lm_eval("eval_tasks")
        given = self.config.options()
        for name in ("sample_prompts", "eval_tasks"):
            if is_distributed() and given[name]:
                raise ConfigError(f"{name}: one process generates text (without --gpus)")
        if is_distributed() and (name := self.config.optimizer.name) != "adamw":
            raise ConfigError(
                f"optimizer: {name} updates whole matrices in one process; use adamw with several "
                "GPUs"
            )

    def _check_settings(self, saved: dict[str, Any]) -> None:
        for name, value in self._settings().items():
            old = saved.get(name, value)
            if name not in FREE_ON_RESUME and old != value:
                raise LigerError(
                    f"{self.run_dir.path}: {name}: the run was started with {short_repr(old)} and "
                    f"cannot be resumed with {short_repr(value)}; leave it out, or start another "
                    "run"
                )

    def _settings(self) -> dict[str, Any]:
        """Return the options with absolute paths: a run may be resumed from another directory.

        An alias becomes the id on the hub: other tools read it in an exported adapter.
        """

        def absolute(value: Any) -> Any:
            if isinstance(value, list):
                return [absolute(each) for each in value]
            if value and os.path.exists(value):
                return os.path.realpath(value)
            return value and ALIASES.get(str(value), value)

        settings = self.config.options()
        paths = ("train_files", "eval_files", "model", "teacher", "tokenizer", "chat_template")
        settings |= {name: absolute(settings[name]) for name in paths if name in settings}
        return {name: value for name, value in settings.items() if name not in NOT_KEPT}

    def _source(self, resumed: bool) -> Path:
        """Return the folder of the checkpoint to start from; write it first if that is needed."""
        options = self.config.model
        start = self.run_dir.path / (START if resumed else NEW_START)
        if not has_own_start(self.config):
            if preset_named(str(options.path)) and not os.path.exists(str(options.path)):
                raise ConfigError(
                    f"model: {options.path} is a preset, which has sizes alone; name a checkpoint, "
                    "or begin with random weights (--from-scratch --tokenizer FOLDER)"
                )
            return Path(resolve(str(options.path), revision=options.revision))
        with error_on_all_ranks():
            if not resumed and rank() == 0:
                write_start(self.config, start)
        return start

    def _rows(self, tokenizer: Tokenizer) -> tuple[Rows, Rows | None]:
        """Return the rows for training and for evaluation."""
        options, objective = self.config.data, self.objective
        objective.open(tokenizer)

        def read(files: Sequence[Path]) -> Sequence[Any]:
            if not options.stream:
                return objective.read(files, tokenizer)
            return stored_documents(files, tokenizer, options.separator, options.names)

        # Files with weights are sources of their own, whose rows are mixed.
        apart = [[file] for file in self.train_files]
        sources = [read(files) for files in (apart if options.data_weights else [self.train_files])]
        held_out = [read(self.eval_files)] if self.eval_files else []
        if not held_out and options.eval_fraction:
            how, alone = (options.eval_fraction, self.config.schedule.seed), len(sources) == 1
            parts = [hold_out(each, *how, i, alone=alone) for i, each in enumerate(sources)]
            sources, held_out = ([part[i] for part in parts] for i in (0, 1))
            if not any(map(len, sources)) or not any(map(len, held_out)):
                raise DataError(
                    "the training data is too small to hold out a part of it for evaluation; give "
                    "evaluation files (--eval-files), or hold out nothing (--eval-fraction 0)"
                )
        rows = self._made("training", sources)
        names = [file.name for file in self.train_files]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.learned = f"{names[0]}{more}, {counted(rows.num_tokens, 'token')}"
        for file, size in zip(self.train_files, rows.sources if options.data_weights else ()):
            if not size:
                raise LigerError(f"{file}: no row is left to train on; leave the file out")
        return rows, self._made("held-out", held_out) if held_out else None

    def _made(self, what: str, sources: Sequence[Sequence[Any]]) -> Rows:
        """Return the rows of some sources, and note what they hold."""
        try:
            rows = self.objective.rows(sources)
        except DataError as error:
            raise DataError(f"{what} data: {error}") from error
        noun = "document" if self.config.loss.packed else "example"
        self._note(
            f"{what} data: {counted(sum(map(len, sources)), noun)}, "
            f"{counted(rows.num_tokens, 'token')}, "
            f"{counted(len(rows), 'row')} of {rows.width:,} tokens"
        )
        if rows.num_untargeted:
            self._note(
                f"{what} data: left out {counted(rows.num_untargeted, 'document')} without a "
                "target (an empty text, or no token that is learned); look at these records"
            )
        if rows.num_truncated:
            self._note(
                f"{what} data: cut {counted(rows.num_truncated, 'example')} to "
                f"{self.config.data.seq_len} tokens; dropped {rows.num_dropped:,} of these because "
                "no target is left"
            )
        return rows

    def _model(
        self, source: Path, tokenizer: Tokenizer, rows: Rows, eval_rows: Rows | None
    ) -> DecoderModel:
        """Return the model as the run trains it, and note what the user should know of it."""
        # Sharding reads each rank's part onto its device. With adapters, it takes the part from a
        # whole model, and the device has room for that only in few bits.
        adapter = self.config.adapter
        waits = self.shards and adapter.lora_r is not None and adapter.load_in is None
        device = torch.device("cpu") if waits else self.device
        meta = self.shards and adapter.lora_r is None
        model = load_model(source, self.config, device, meta=meta)
        if self.config.tokenizer.chat_template is not None:
            kept = {n: x for n, x in model.source.files.items() if n == GENERATION_CONFIG_NAME}
            model.source.files = tokenizer.files() | kept
        highest = max(packed.max_id for packed in (rows, eval_rows) if packed is not None)
        if highest >= model.config.vocab_size:
            raise ConfigError(
                f"{source}: vocab_size: the tokenizer makes token {highest}, but the model has "
                f"only {model.config.vocab_size} tokens; use a tokenizer that fits this model"
            )
        if (linears := float8.report(model)) is not None:
            self._note(f"linears: {linears}")
        limit = model.config.max_position_embeddings
        if rows.width > limit:
            self._note(
                f"rows of {rows.width} tokens are longer than the model's max_position_embeddings "
                f"({limit})"
            )
        return model

    def _shard(self, model: DecoderModel) -> None:
        """Spread the model over the ranks, and read each rank's part of it."""
        if self.config.model.compile:
            for layer in model.layers:
                layer.compile()
        mesh, parallel = None, self.config.parallel
        together, experts = parallel.context_parallel, parallel.expert_parallel
        if together * experts > 1:
            sizes = num_row_ranks() // experts, experts, together
            names = "dp_shard", "ep", "cp"
            given = {k: n for k, n in zip(names, sizes) if n > 1 or k == "dp_shard"}
            mesh = init_device_mesh(self.device.type, (*given.values(),), mesh_dim_names=(*given,))
        shard(model, mesh, compute_dtype=torch.bfloat16 if self.precision != "float32" else None)

    def _plan_memory(
        self,
        trained: torch.nn.Module,
        rows: Sequence[Rows],
        saved: dict[str, Any] | None,
        held: int,
    ) -> None:
        """Choose what the layers keep for backward; a resumed run keeps its plan.

        Args:
            trained: what the optimizer trains: the model, or one that contains it.
            held: the bytes on the device that the reference model takes.
        """
        config, model, budget = self.config, self.model, self.config.memory.budget
        if config.memory.activation_checkpointing:
            model.activation_checkpointing_enable()
            return
        if saved and (saved["settings"]["memory"], saved["ranks"]) == (budget, num_row_ranks()):
            plan, self.casts_once = saved["memory_plan"], saved["casts_once"]
            model.set_memory_plan(None if plan is None else MemoryPlan.from_dict(plan))
            return
        # A step on a GPU is simulated with the Triton kernels.
        on_gpu = self.device.type == "cuda" and choose(self.device)[0] == "triton"
        usual = "auto" if on_gpu else "off"
        if (budget or usual) == "off":
            return
        accumulates = config.schedule.gradient_accumulation_steps > 1
        most = max(each.most_documents for each in rows) if takes_starts(trained, config) else 1
        run = planner(
            model,
            budget or usual,
            precision=self.precision,
            accumulates=accumulates,
            packed=needs_positions(trained) or any(each.is_packed for each in rows),
            max_seqlen=-(-max(each.width for each in rows) // most) if most > 1 else None,
            optimizer_bytes=make_optimizer(trained, config.optimizer),
            step_module=self.objective.planned_step(trained),
        )
        run.budget = max(0, run.budget - held)
        largest, casts = self.objective.largest_batch(rows), float8.casts_bytes(model)
        plan = None
        if (accumulates or config.adapter.lora_r) and casts and self.casts_once:
            run.budget -= casts
            with contextlib.suppress(ConfigError):
                plan = run.plan(*largest, times=False)
            self.casts_once = plan is not None
            run.budget += 0 if self.casts_once else casts
        plan = plan or run.plan(*largest, times=False)
        model.set_memory_plan(plan)
        self._note(f"memory: {summary(plan)}", shows=self.show is None)  # or the header does

    def _start(
        self,
        source: Path,
        base: dict[str, str],
        others: dict[str, str],
        rows: Rows,
        saved: dict[str, Any] | None,
    ) -> None:
        """Write the settings of a new run, or check that a resumed run has the same rows and model.

        Everything has loaded by now. A load that fails therefore leaves an older run unchanged.
        """
        settings, plan = self._settings(), self.model.memory_plan
        inputs = {"base": base, "others": others, "rows": rows.fingerprint()}
        fixed = {name: x for name, x in settings.items() if name not in FREE_ON_RESUME}
        facts: dict[str, Any] = {
            "format": RUN_FORMAT,
            "id": saved["id"] if saved else fingerprint({**inputs, "settings": fixed}),
            "ligermodels": __version__,
            "settings": settings,
            **inputs,
            "memory_plan": None if plan is None else plan.to_dict(),
            "casts_once": self.casts_once,
            "ranks": self.ranks,
            "launch": processes.launch_id(),
        }
        if saved is not None:
            path = self.run_dir.path
            check_same(source, path, saved["base"], base)
            for name, digest in others.items():
                then = {name: saved["others"].get(name)}
                check_same(settings[name], path, then, {name: digest})
            if saved["rows"] != facts["rows"]:
                files = ", ".join(map(str, self.train_files))
                raise LigerError(
                    f"{path}: the training data ({files}) or the part that is held out is not what "
                    "the run was started with; restore the files and their order, or start another "
                    "run"
                )
            if saved.get("ended") and self.checkpoints.latest() is None:
                raise LigerError(
                    f"{path}: this run has ended, its model is in {self.run_dir.model_dir}, and "
                    "there is no checkpoint to resume from; to train once more, overwrite it "
                    "(--overwrite-output-dir)"
                )
        self.checkpoints.run_id = facts["id"]
        ranks = self.ranks * self.config.parallel.context_parallel
        command: dict[str, Any] = {"gpus": ranks} if ranks > 1 else {}
        if self.modules:
            command["import"] = [*self.modules]
        if rank() == 0:
            if saved is None:
                if not is_distributed():
                    self.interrupts.check()
                self.run_dir.clear()
                if has_own_start(self.config):
                    os.replace(source, self.run_dir.path / START)
            self.run_dir.write_settings(facts, config_text(settings, command))
        self.began, self.facts = True, facts

    def _finish(self, trainer: Trainer) -> FinetuneResult:
        """Export the model, draw the losses and return the result."""
        options, last = self.config.output, trainer.total_steps
        self.objective.end()
        if trainer.total_steps < trainer.planned_steps:
            self._note(
                f"ended early after step {last}: no evaluation since step {trainer.best} was better"
            )
        if options.keep_best and not trainer.has_helped:
            self._note("no evaluation is better than that before the first step")
        if options.keep_best and trainer.best not in (None, last):
            trainer.save()  # with the weights of its last step
            last = trainer.best
            self.checkpoints.load(last, trainer.model)
            self._note(f"the export has the weights after step {last}, of the best evaluation")
        with stage("writing the export", shows=self.progress):
            try:
                model = self._export(trainer)
            except SaveError:
                trainer.save()  # With save_steps=0, nothing else has the weights.
                raise
        self.exported = True
        metrics = from_rank_0(self.run_dir.metrics.read() if rank() == 0 else [])
        with error_on_all_ranks():
            if rank() == 0:
                title = f"{Path(str(self.config.model.path)).name}: {self.learned}"
                if not plot_losses(metrics, self.run_dir.path / "loss.png", title):
                    self._note(
                        "loss.png was not drawn, because matplotlib is not installed "
                        "(pip install 'ligermodels[plot]')"
                    )
                self.run_dir.write_settings({**self.facts, "ended": True})
                if not options.save_steps:  # An interruption may have written some.
                    self.checkpoints.clear()
                if options.push_to_hub is not None:
                    folder, private = self.run_dir.model_dir, options.hub_private_repo
                    self._note(
                        f"pushed to {reports.push(folder, options.push_to_hub, private=private)}"
                    )
        losses = {entry["step"]: entry["loss"] for entry in metrics if "loss" in entry}
        evals = {e["step"]: e for e in metrics if any(key.startswith("eval_") for key in e)}
        return FinetuneResult(
            output_dir=self.run_dir.path,
            model_dir=self.run_dir.model_dir,
            steps=trainer.total_steps,
            exported_step=last,
            loss=losses.get(last),
            eval_before=evals.get(0, {}),
            eval_after=evals.get(last, {}),
            shown=self.objective.shown,
            metrics=metrics,
            model=model,
            notes=self.notes,
        )

    def _export(self, trainer: Trainer) -> DecoderModel:
        """Write the export, and return the model that it holds."""
        options, adapter, trained = self.config.output, self.config.adapter, trainer.model
        dtype = None if options.export_dtype is None else getattr(torch, options.export_dtype)
        model = self._whole_model()
        checked = trained if model is self.model else model
        odd = first_not_finite(checked.named_parameters(), dtype)
        if odd or dtype is not None:
            trainer.save()  # while the weights are as trained
        if odd:
            raise LigerError(
                f"{self.run_dir.path}: the trained weights cannot be exported: {odd} has values "
                f"too large for {options.export_dtype}; to export them in another dtype, resume "
                "the run with it (--resume --export-dtype bfloat16)"
            )
        if adapter.lora_r is None:
            trained.to(dtype)
        self._write(model, dtype)
        return model

    def _whole_model(self) -> DecoderModel:
        """Return the model to export: that of the run, or on rank 0 one with the adapters added."""
        adapter = self.config.adapter
        if adapter.lora_r is None or adapter.export == "adapter":
            return self.model
        found = adapter_of(self.model)  # of which ranks may have a part each
        with error_on_all_ranks():
            if rank():
                return self.model
            source, then = self.base
            check_same(source, self.run_dir.path, then, file_hashes(source))
            return merged(self.model, found)

    def _push_save(self, step: int) -> None:
        """Export the model after a checkpoint, and push it; without a connection, only say so."""
        output = self.config.output
        self._write(self._whole_model(), None)
        if rank() == 0:
            repo, private = str(output.push_to_hub), output.hub_private_repo
            try:
                reports.push(self.run_dir.model_dir, repo, private=private, what=f"step {step}")
            except SaveError as error:
                self._note(f"step {step}: {error}")

    def _write(self, model: DecoderModel, dtype: torch.dtype | None) -> None:
        """Write the export: a model, or its adapters."""
        options, adapter, folder = self.config.output, self.config.adapter, self.run_dir.model_dir
        in_parts = self.shards and adapter.lora_r is None  # or else one rank has the whole
        with contextlib.nullcontext() if in_parts else error_on_all_ranks(SaveError):
            if adapter.lora_r is not None and adapter.export == "adapter":
                base = self._settings()["model"]
                if has_own_start(self.config):
                    base = os.path.realpath(self.run_dir.path / START)
                if self.shards or rank() == 0:
                    export_adapter(model, folder, base, dtype)
            elif in_parts or rank() == 0:
                model.to(dtype).save_hf(
                    folder, max_shard_size=options.max_shard_size, write_heads=self.objective.export
                )

    def _note(self, text: str, shows: bool = True) -> None:
        self.notes.append(text)
        if self.progress and shows:
            print(text, file=sys.stderr)
