"""Fine-tune a checkpoint: `finetune(FinetuneConfig(model=..., train_files=[...], output_dir=...))`.

`finetune` decides which run goes on in the output folder, and what a signal leaves there. `Run` has
the stages of a run: it loads the model and the data, trains and exports. `data` and `packing` make
the rows, `trainer` runs the training steps, and `run_dir` manages the output folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from ligermodels import __version__
from ligermodels.adapters.adapted_model import export_adapter, merged
from ligermodels.converters.hub import resolve
from ligermodels.errors import ConfigError, DataError, LigerError, SaveError, first_line, short_repr
from ligermodels.heads.medusa_file import HEADS_NAME
from ligermodels.kernels.dispatch import choose
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.ranks import (
    error_on_all_ranks,
    from_rank_0,
    is_distributed,
    rank,
)
from ligermodels.parallel.shard import shard
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.checkpoints import Checkpoints, first_not_finite
from ligermodels.training.config import FREE_ON_RESUME, NOT_KEPT, FinetuneConfig, config_text
from ligermodels.training.data import Library, is_dataset, local_files, stored_documents
from ligermodels.training.model import (
    changed,
    difference,
    file_hashes,
    load_model,
    planner,
    summary,
    weights_hash,
)
from ligermodels.training.objectives import Rows
from ligermodels.training.optimizers import make_optimizer
from ligermodels.training.packing import hold_out
from ligermodels.training.processes import (
    Interrupted,
    Interrupts,
    barrier,
    is_restarted,
    launch_id,
    local_device,
    losing_ranks,
    num_row_ranks,
    process_group,
)
from ligermodels.training.reports import (
    FinetuneResult,
    Sampler,
    check_login,
    logged,
    logger_openers,
    profiled,
    push,
)
from ligermodels.training.run_dir import (
    RUN_FORMAT,
    ReadOnlyRunDir,
    RunDir,
    file_hash,
    fingerprint,
    plot_losses,
)
from ligermodels.training.trainer import Trainer


def finetune(
    config: FinetuneConfig,
    *,
    progress: bool = True,
    modules: Sequence[str] = (),
    data_library: Library | None = None,
) -> FinetuneResult:
    """Train, evaluate and export as `config` says.

    With `progress`, a progress bar and notes go to stderr. The run may be killed at any moment, and
    `resume=True` continues it. SIGINT and SIGTERM save a checkpoint first, if the caller has no
    handlers of its own. On a CPU in float32, the resumed run gives the same weights bit for bit.
    `modules` are those that the command line has imported: run.yaml names them, and so does the
    command in the message of an interrupted run. `data_library` imports what reads data sets,
    tables and data larger than memory, such as `lambda: ligermodels.integrations.hub_data`.

    Raises:
        DataError: a file is missing, unreadable or empty; the message names file and line.
        CheckpointError, ConfigError: the model cannot be loaded or does not support an option, or
            what a resumed run needs was changed or damaged.
        SaveError: the output cannot be written.
        LigerError: the output folder holds another run, or a loss or weight is no longer finite.
        Interrupted: SIGINT or SIGTERM came; the message says what is saved.
    """
    output = config.output
    device = local_device(pick_device(config.model.device))
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            process_group(device, config.parallel.rank_timeout, config.parallel.context_parallel)
        )
        progress = progress and rank() == 0
        interrupts = stack.enter_context(Interrupts(verbose=progress))
        run_dir = (ReadOnlyRunDir if rank() else RunDir)(str(output.output_dir))
        run = None
        try:
            with error_on_all_ranks():
                found = (run_dir.read_settings() if is_restarted() else None) or {}
            # Processes that failed before they began a run may have found another one here.
            if from_rank_0(bool(found) and found["launch"] == launch_id()):
                output = replace(output, resume=True, overwrite_output_dir=False)
                config = replace(config, output=output)
            gpus = [device] if device.type == "cuda" else []
            # fork_rng restores the random generators of the caller.
            with _locked(run_dir), torch.random.fork_rng(devices=gpus):
                with error_on_all_ranks():
                    run = Run(config, run_dir, device, progress, interrupts, modules, data_library)
                    run_dir.check(output.resume, output.overwrite_output_dir, run.inputs())
                with losing_ranks():
                    return run.run()
        except LigerError:
            raise
        except BaseException as error:
            # An interrupted library may raise something else than KeyboardInterrupt.
            if interrupts.signum is None and not isinstance(error, KeyboardInterrupt):
                raise
            signum = interrupts.signum or signal.SIGINT
            raise Interrupted(
                _what_is_saved(run, str(output.output_dir), modules), signum
            ) from error


@contextlib.contextmanager
def _locked(run_dir: RunDir) -> Iterator[None]:
    """Lock the folder of a run on rank 0. If that fails, it fails on all ranks."""
    with contextlib.ExitStack() as stack:
        with error_on_all_ranks():
            stack.enter_context(run_dir.locked())
        yield


def _what_is_saved(run: Run | None, output_dir: str, modules: Sequence[str]) -> str:
    """Say what an interrupted run has left in its folder, and how to go on."""
    if run is not None and run.exported:
        return f"interrupted after the export; {run.run_dir.model_dir} is complete"
    words = ["ligermodels", "finetune", "--resume", "--output-dir", output_dir]
    for module in modules:
        words += ["--import", module]
    command = f"'{shlex.join(words)}'"
    if run is None or not run.began:
        return "interrupted before the run began; nothing was changed"
    step = run.checkpoints.latest()
    if step is None:
        return f"interrupted before a step was saved; {command} starts from the beginning"
    return f"interrupted; the state after step {step} is saved, and {command} continues from there"


def resumed_settings(output_dir: str | Path) -> dict[str, Any]:
    """Return the options that started the run in `output_dir`, or {} if there is no run.

    Raises:
        CheckpointError: run.json is damaged.
    """
    saved = RunDir(output_dir).read_settings()
    return {k: v for k, v in saved["settings"].items() if k not in NOT_KEPT} if saved else {}


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name. None selects a GPU if there is one, else the CPU.

    Raises:
        ConfigError: the device does not exist, or it is neither a CPU nor a GPU.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):  # torch would list all that it knows
        raise ConfigError(f"device: must be cpu or cuda, not {name!r}")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigError(f"device: {name!r} cannot be used: {reason}") from None
    return device


class Run:
    """The stages of one call of `finetune`: load, train and export."""

    def __init__(
        self,
        config: FinetuneConfig,
        run_dir: RunDir,
        device: torch.device,
        progress: bool,
        interrupts: Interrupts,
        modules: Sequence[str] = (),
        library: Library | None = None,
    ) -> None:
        usual = "bf16-mixed" if device.type == "cuda" else "float32"
        self.precision = config.model.precision or usual
        self.config = config = replace(
            config, model=replace(config.model, precision=self.precision)
        )
        self.run_dir = run_dir
        self.checkpoints = Checkpoints(run_dir.checkpoint_dir)
        self.device = device
        self.interrupts = interrupts
        self.modules = modules
        self.library = library
        self.began = False  # whether run.json describes this run
        self.exported = False
        self.sampler: Sampler | None = None
        self.saved: dict[str, Any] = {}  # the content of run.json
        self.progress = progress
        self.notes: list[str] = []
        self.stored_hash: str | None = None  # of the base model's weights, where few bits are kept
        self.train_files, self.eval_files = (
            local_files(names or [], library, progress=progress)
            for names in (config.data.train_files, config.data.eval_files)
        )
        self.objective = config.loss.objective(config)
        if config.output.push_to_hub is not None:
            check_login()
        self.openers = [] if rank() else logger_openers(config.output.report_to)
        if is_distributed() and config.output.sample_prompts:
            raise ConfigError("sample_prompts: one process generates samples (without --gpus)")
        if is_distributed() and (name := config.optimizer.name) != "adamw":
            raise ConfigError(
                f"optimizer: {name} updates whole matrices in one process; use adamw with several "
                "GPUs"
            )
        # Several processes hold a part of the model each, or the whole of one that hardly learns.
        whole = self.objective.whole_model or config.adapter.lora_r is not None
        self.shards = is_distributed() and not whole

    def inputs(self) -> list[str | Path]:
        """Return the paths that the run reads, some of which may be names of the hub."""
        models = str(self.config.model.path), getattr(self.config.loss, "teacher", None)
        return [*filter(None, models), *self.train_files, *self.eval_files]

    def run(self) -> FinetuneResult:
        config = self.config
        with error_on_all_ranks():
            saved = self.run_dir.read_settings() if config.output.resume else None
        saved = from_rank_0(saved)
        if saved is not None:
            self._check_settings(saved["settings"])
        self.began = saved is not None
        with error_on_all_ranks():
            source = Path(resolve(str(config.model.path), revision=config.model.revision))
            files = file_hashes(source)
            rows, eval_rows = self._rows(source)
            model = self._model(source, rows, eval_rows)
        if self.shards:
            self._shard(model)
        held = self.objective.load(model)
        trained = self.objective.module(model)
        every = [each for each in (rows, eval_rows) if each is not None]
        self._plan_memory(model, trained, every, saved, held)
        # A run that is resumed by another number of ranks makes the same steps.
        self.ranks = num_row_ranks() if saved is None else saved["ranks"]
        self.model = model
        trainer = Trainer(
            trained,
            config,
            rows,
            eval_rows,
            self.device,
            self.precision,
            self.objective,
            ranks=self.ranks,
        )
        with error_on_all_ranks():
            if config.output.sample_prompts:
                self.sampler = Sampler(config.output, Tokenizer.from_hf(source))
        with self.interrupts.held():
            weights = self.stored_hash or weights_hash(model)
            base = {**files, "weights": weights, **self.objective.hashes()}
            with error_on_all_ranks():
                self._start(source, base, rows, trainer, saved)

            def check() -> None:
                where = f"step {trainer.done}"
                found = barrier(where, self.interrupts.signum, config.parallel.rank_timeout)
                self.interrupts.signum = found
                self.interrupts.check()

            try:
                folder = self.run_dir.reference_dir
                self.objective.prepare(model, trainer.call, every, folder, fingerprint(base))
                last = from_rank_0(self.checkpoints.latest() if rank() == 0 else None) or 0
                profile = self.run_dir.profile_dir if config.output.profile and not rank() else None
                with (
                    logged(self.run_dir, self.openers, self.saved["settings"], last),
                    profiled(profile, trainer.total_steps - last) as after_step,
                ):
                    trainer.train(
                        self.run_dir,
                        self.checkpoints,
                        check=check,
                        sample=self._sampling(trainer, last),
                        after_step=after_step,
                        progress=self.progress,
                    )
                check()
                result = self._finish(trainer)
            except KeyboardInterrupt:
                if not self.exported:
                    trainer.save(self.run_dir, self.checkpoints)
                raise
        return result

    def _sampling(self, trainer: Trainer, last: int) -> Callable[[int], None]:
        """Return what writes the samples of a step into the run's folder, and shows them."""
        sampler = self.sampler
        if sampler is None:
            return lambda step: None
        done = self.run_dir.sampled_steps(last)

        def sample(step: int) -> None:
            if step not in done:
                with trainer.autocast():
                    samples = sampler(self.model)
                self.run_dir.log_samples(step, samples)
                for each in samples if self.progress else ():
                    tqdm.write(f"step {step}: {each['prompt']} -> {each['text']}", file=sys.stderr)

        return sample

    def _shard(self, model: DecoderModel) -> None:
        """Spread the model over the ranks, and read each rank's part of it."""
        if self.config.model.compile:
            for layer in model.layers:
                layer.compile()
        mesh, together = None, self.config.parallel.context_parallel
        if together > 1:
            sizes = num_row_ranks(), together
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp_shard", "cp"))
        shard(model, mesh, compute_dtype=torch.bfloat16 if self.precision != "float32" else None)

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
        """Return the options with absolute paths: a run may be resumed from another directory."""
        settings = self.config.options()
        for name in ("train_files", "eval_files"):
            if settings[name] is not None:
                settings[name] = [
                    name if is_dataset(name) else os.path.realpath(name) for name in settings[name]
                ]
        for name in ("model", "teacher"):
            if settings.get(name) is not None and os.path.isdir(settings[name]):
                settings[name] = os.path.realpath(settings[name])
        return {name: value for name, value in settings.items() if name not in NOT_KEPT}

    def _rows(self, source: Path) -> tuple[Rows, Rows | None]:
        """Return the rows for training and for evaluation."""
        options, objective = self.config.data, self.objective
        tokenizer = Tokenizer.from_hf(source)
        objective.open(tokenizer)

        def read(files: Sequence[Path]) -> Sequence[Any]:
            if not options.stream:
                return objective.read(files, tokenizer)
            return stored_documents(
                files, tokenizer, source, self.library, options.separator, progress=self.progress
            )

        # Files with weights are sources of their own, whose rows are mixed.
        apart = [[file] for file in self.train_files]
        sources = [read(files) for files in (apart if options.data_weights else [self.train_files])]
        held_out = [read(self.eval_files)] if self.eval_files else []
        if not held_out and options.eval_fraction:
            parts = [
                hold_out(
                    *(source, options.eval_fraction, self.config.schedule.seed, number),
                    alone=len(sources) == 1,
                )
                for number, source in enumerate(sources)
            ]
            sources, held_out = ([part[i] for part in parts] for i in (0, 1))
            if not any(map(len, sources)) or not any(map(len, held_out)):
                raise DataError(
                    "the training data is too small to hold out a part of it for evaluation; give "
                    "evaluation files (--eval-files), or hold out nothing (--eval-fraction 0)"
                )
        rows = self._made("training", sources)
        for file, size in zip(self.train_files, rows.sources if options.data_weights else ()):
            if not size:
                raise LigerError(f"{file}: no row is left to train on; leave the file out")
        return rows, self._made("held-out", held_out) if held_out else None

    def _made(self, what: str, sources: Sequence[Sequence[Any]]) -> Rows:
        """Return the rows of some sources, and note what they hold."""
        rows = self.objective.rows(sources)
        noun = "document" if self.config.loss.packed else "example"
        self._note(
            f"{what} data: {_count(sum(map(len, sources)), noun)}, "
            f"{_count(rows.num_tokens, 'token')}, "
            f"{_count(len(rows), 'row')} of {rows.width:,} tokens"
        )
        if rows.num_untargeted:
            self._note(
                f"{what} data: left out {_count(rows.num_untargeted, 'document')} without a target "
                "(an empty text, or no token that is learned); look at these records"
            )
        if rows.num_truncated:
            self._note(
                f"{what} data: cut {_count(rows.num_truncated, 'example')} to "
                f"{self.config.data.seq_len} tokens; dropped {rows.num_dropped:,} of these because "
                "no target is left"
            )
        return rows

    def _model(self, source: Path, rows: Rows, eval_rows: Rows | None) -> DecoderModel:
        # Sharding reads each rank's part onto its device. A frozen model is whole on each rank.
        model, self.stored_hash = load_model(
            source, self.config, self.precision, self.device, meta=self.shards
        )
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
        if not all(p.requires_grad for p in model.parameters()):
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            what = "the others are" if self.config.adapter.lora_r is None else "the model is"
            self._note(f"{_count(trained, 'trained parameter')}; {what} frozen")
        if not self.objective.trains_heads and os.path.lexists(source / HEADS_NAME):
            self._note(
                f"{source / HEADS_NAME}: this run neither trains nor exports these heads "
                "(--loss medusa does)"
            )
        return model

    def _plan_memory(
        self,
        model: DecoderModel,
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
        config = self.config
        if config.memory.activation_checkpointing:
            model.activation_checkpointing_enable()
        elif (
            saved is not None
            and saved["settings"].get("memory") == config.memory.budget
            and saved["ranks"] == num_row_ranks()
        ):
            plan = saved.get("memory_plan")
            model.set_memory_plan(None if plan is None else MemoryPlan.from_dict(plan))
        elif (budget := self._budget()) != "off":
            accumulates = config.schedule.gradient_accumulation_steps > 1
            run = planner(
                model,
                budget,
                precision=self.precision,
                accumulates=accumulates,
                optimizer_bytes=make_optimizer(trained, config),
                step_module=self.objective.planned_step(trained, rows),
            )
            run.budget = max(0, run.budget - held)
            try:
                plan = run.plan(*self.objective.largest_batch(rows))
            except ConfigError as error:
                if not held:
                    raise
                raise ConfigError(
                    f"{error}; besides, the reference model takes {held} bytes"
                ) from None
            model.set_memory_plan(plan)
            self._note(f"memory: {summary(plan)}")

    def _budget(self) -> str:
        """Return "off", or the memory that the run may take."""
        budget = self.config.memory.budget
        if budget == "auto" and self.device.type != "cuda":
            raise ConfigError(
                f'memory: "auto" is what is free on a GPU, and this run is on {self.device}; leave '
                'it out, or give a number of bytes, such as "8GiB"'
            )
        if budget is not None:
            return budget
        if not self.objective.keeps_tensors:
            return "off"
        # A step on a GPU is simulated with the Triton kernels.
        on_gpu = self.device.type == "cuda" and choose(self.device)[0] == "triton"
        return "auto" if on_gpu else "off"

    def _start(
        self,
        source: Path,
        base: dict[str, str],
        rows: Rows,
        trainer: Trainer,
        saved: dict[str, Any] | None,
    ) -> None:
        """Write the settings of a new run, or check that a resumed run has the same rows and model.

        Everything has loaded by now. A load that fails therefore leaves an older run unchanged.
        """
        in_use = self.model.memory_plan
        facts = {"base": base, "rows": rows.fingerprint(), "steps": trainer.total_steps}
        settings = self._settings()
        self.saved = {
            "settings": settings,
            **facts,
            "memory_plan": None if in_use is None else in_use.to_dict(),
            "ranks": self.ranks,
            "launch": launch_id(),
        }
        if saved is None:
            files = {os.path.realpath(file): file_hash(file) for file in self.train_files}
            self.saved |= {"format": RUN_FORMAT, "files": files}
            self.saved["ligermodels"] = __version__
            if not is_distributed():
                self.interrupts.check()
            self.run_dir.clear()
            self.run_dir.write_settings(self.saved)
            self.began = True
        else:
            self._check_same(source, saved, facts)
            self.saved = {**saved, **self.saved}
            if saved != self.saved:
                self.run_dir.write_settings(self.saved)
        ranks = self.ranks * self.config.parallel.context_parallel
        command: dict[str, Any] = {"gpus": ranks} if ranks > 1 else {}
        if self.modules:
            command["import"] = [*self.modules]
        self.run_dir.write_config(config_text(settings, command))
        fixed = {name: settings[name] for name in settings if name not in FREE_ON_RESUME}
        self.checkpoints.run = fingerprint({"settings": fixed, **facts})

    def _check_same(self, source: Path, saved: dict[str, Any], facts: dict[str, Any]) -> None:
        """Raise LigerError if a run is resumed with another model or other data."""
        where = self.run_dir.path
        if other := changed(saved["base"], facts["base"]):
            raise LigerError(
                f"{source}: this is not what the run in {where} was started with: "
                f"{', '.join(other)} changed; restore it, or start another run"
            )
        if saved["rows"] != facts["rows"]:
            raise LigerError(
                f"{where}: the training data is not what the run was started with: "
                f"{difference(saved['files'], self.train_files)}; restore it, or start another run"
            )

    def _finish(self, trainer: Trainer) -> FinetuneResult:
        """Export the model, draw the losses and return the result."""
        config = self.config.output
        model = self._export(trainer)
        self.exported = True
        metrics = from_rank_0(self.run_dir.read_metrics() if rank() == 0 else [])
        if rank() == 0 and not plot_losses(metrics, self.run_dir.loss_plot):
            self._note(
                "loss.png was not drawn, because matplotlib is not installed "
                "(pip install 'ligermodels[plot]')"
            )
        if not config.save_steps and rank() == 0:  # An interruption may have written some.
            self.checkpoints.clear()
        if config.push_to_hub is not None:
            with error_on_all_ranks():
                if rank() == 0:
                    url = push(
                        self.run_dir.model_dir, config.push_to_hub, private=config.hub_private_repo
                    )
                    self._note(f"pushed to {url}")
        losses = {entry["step"]: entry["loss"] for entry in metrics if "loss" in entry}
        evals = {e["step"]: e for e in metrics if any(key.startswith("eval_") for key in e)}
        last = trainer.total_steps
        return FinetuneResult(
            output_dir=self.run_dir.path,
            model_dir=self.run_dir.model_dir,
            steps=trainer.total_steps,
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
        options, adapter = self.config.output, self.config.adapter
        trained, name = trainer.model, options.export_dtype
        dtype = None if name is None else getattr(torch, name)
        where = f"{self.run_dir.path}: the trained weights cannot be exported"
        if odd := first_not_finite(trained.named_parameters()):
            raise LigerError(
                f"{where}: the last update makes {odd} infinite or NaN; try a lower learning rate "
                "or a longer warm-up"
            )
        model, with_adapters = self.model, adapter.lora_r is not None
        with error_on_all_ranks():
            if adapter.export == "merged" and with_adapters and rank() == 0:
                model = merged(model)
        checked = trained if model is self.model else model
        if odd := first_not_finite(checked.named_parameters(), dtype):
            trainer.save(self.run_dir, self.checkpoints)
            raise LigerError(
                f"{where}: {odd} has values too large for {name}; to export them in another dtype, "
                "resume the run with it (--resume --export-dtype bfloat16)"
            )
        folder, shard_size = self.run_dir.model_dir, options.max_shard_size
        if with_adapters:
            with error_on_all_ranks(SaveError):
                if adapter.export == "adapter" and rank() == 0:
                    export_adapter(model, folder, self._settings()["model"], dtype)
                elif rank() == 0:
                    model.to(dtype).save_hf(folder, max_shard_size=shard_size)
            return model
        if dtype is not None:
            trainer.save(self.run_dir, self.checkpoints)  # while the weights are as trained
            trained.to(dtype)
            model.to(dtype)
        save = partial(
            model.save_hf, folder, max_shard_size=shard_size, write_heads=self.objective.export
        )
        if self.shards:  # all ranks together, which have a part each
            save()
        else:
            with error_on_all_ranks(SaveError):
                if rank() == 0:
                    save()
        return model

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self.progress:
            tqdm.write(text, file=sys.stderr)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
