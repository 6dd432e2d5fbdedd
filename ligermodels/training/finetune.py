"""Fine-tune a checkpoint: `finetune(FinetuneConfig(model=..., train_files=[...], output_dir=...))`.

This module decides which run goes on in the output folder, and what a signal leaves there. `run`
has the stages of a run, from the options to the export.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ligermodels.errors import ConfigError, LigerError, first_line
from ligermodels.parallel.ranks import error_on_all_ranks, from_rank_0, rank
from ligermodels.training.config import NOT_KEPT, FinetuneConfig
from ligermodels.training.processes import (
    Interrupted,
    Interrupts,
    is_restarted,
    launch_id,
    local_device,
    losing_ranks,
    process_group,
)
from ligermodels.training.records import Library
from ligermodels.training.reports import FinetuneResult
from ligermodels.training.run import Run
from ligermodels.training.run_dir import ReadOnlyRunDir, RunDir


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
