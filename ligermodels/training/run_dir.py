"""The folder of a training run: its settings and metrics, and how its files are written and hashed.

    run.json        the options of the run, its id, and the hashes of its model and data
    run.yaml        the options, for `ligermodels finetune --config`
    metrics.jsonl   one line per step and per evaluation
    samples.jsonl   texts that the model generated at evaluations
    start/          the checkpoint that the run starts from, if the run has made it
    checkpoints/    step-00000100/: weights and optimizer state after that step
    reference/      log-probabilities of the reference model
    model/          the export
    loss.png        the loss curve
    tensorboard/    event files of TensorBoard

A run begins in an empty folder, and with run.json that is its own. A file is written beside its
final name, flushed to the disk and renamed, so that a reader finds the old file or the new file,
and never a part. Only metrics.jsonl and samples.jsonl grow in place. On resume they are cut back to
the checkpoint's step.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from ligermodels.converters.files import (
    names_if_present,
    open_if_present,
    open_regular,
    parse_json,
    read_json_if_present,
)
from ligermodels.converters.save_dir import sync_file, sync_folder
from ligermodels.errors import CheckpointError, DataError, LigerError, SaveError, short_repr
from ligermodels.pictures import INK, ORDER, OURS, picture
from ligermodels.ranks import error_on_all_ranks, rank

RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
START, NEW_START = "start", "start.new"  # the second until the run begins
# What a new run in the folder removes.
OWNED = (
    *("run.yaml", "metrics.jsonl", "samples.jsonl", CHECKPOINTS, "reference", "model", "loss.png"),
    *("tensorboard", "wandb_id", "mlflow_id", "metrics.csv", START),
)
PART = ".part"  # the end of the name of a file that is not whole

# The version of run.json and of the checkpoints. A run of another one is not resumed.
RUN_FORMAT = 7

# One line of metrics.jsonl: the "step", and the values measured at it, such as "loss".
Metrics = dict[str, float]


class Lines:
    """A file of JSON objects, one on a line, each with the "step" that it belongs to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *entries: Mapping[str, Any]) -> None:
        """Add lines."""
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    def read(self) -> list[dict[str, Any]]:
        """Return the lines, without a last line that a kill cut short.

        Raises:
            CheckpointError: the file cannot be read, or a line is not one that a run writes.
        """
        file = open_if_present(self.path, CheckpointError)
        if file is None:
            return []
        with file:
            lines = file.readall().split(b"\n")[:-1]
        try:
            return [
                parse_json(line, f"{self.path}:{number}", CheckpointError)
                for number, line in enumerate(lines, start=1)
            ]
        except CheckpointError as error:
            raise CheckpointError(f"{error}; restore or remove the file") from None

    def cut(self, step: int) -> list[dict[str, Any]]:
        """Remove the lines after a step, and return the others; a negative step removes all."""
        kept = [entry for entry in self.read() if entry["step"] <= step]
        if self.path.exists():
            atomic_write(self.path, lambda part: Lines(part).append(*kept))
        return kept

    def sync(self) -> None:
        """Flush the file to the disk: what a checkpoint goes on from must not be lost."""
        if self.path.exists():
            with writing(self.path):
                sync_file(self.path)


class RunDir:
    """The folder of one run, at `path`. Rank 0 alone writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = Lines(self.path / "metrics.jsonl")
        self.samples = Lines(self.path / "samples.jsonl")
        self.listener: Callable[[Metrics], object] | None = None  # it gets each line of metrics
        self.model_dir = self.path / "model"
        self.checkpoint_dir = self.path / CHECKPOINTS

    def check(self, resume: bool, overwrite: bool, inputs: Iterable[str | Path]) -> None:
        """Raise LigerError if the folder must not be written to.

        It must be empty, or hold a run that is resumed or overwritten. Overwriting must not remove
        any of `inputs`, which the run reads.
        """
        names = {*(names_if_present(self.path, CheckpointError) or ())}
        elsewhere = "choose another folder (--output-dir)"
        if names - {LOCK_FILE, RUN_FILE + PART, NEW_START} and RUN_FILE not in names:
            raise LigerError(f"{self.path}: the folder is not empty and holds no run; {elsewhere}")
        if RUN_FILE in names and not resume and not overwrite:
            raise LigerError(
                f"{self.path}: the folder holds another run; resume it (--resume), overwrite it "
                f"(--overwrite-output-dir), or {elsewhere}"
            )
        removed = {Path(os.path.realpath(self.path / name)) for name in OWNED}
        for source in inputs if overwrite else ():
            real = Path(os.path.realpath(source))
            if removed & {real, *real.parents}:
                raise LigerError(
                    f"{source}: overwriting {self.path} would remove this, which the run reads; "
                    f"{elsewhere}"
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other runs from writing to it inside the context.

        If no run has begun when the context ends, what was created here is removed again.

        Raises:
            LigerError: on all ranks, another run has the folder, or it cannot be written to.
        """
        path, start = self.path / LOCK_FILE, self.path / NEW_START
        is_new, had_start = not os.path.exists(self.path), os.path.lexists(start)
        with contextlib.ExitStack() as stack:
            with error_on_all_ranks(), writing(self.path):
                if rank() == 0:
                    self.path.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(open(path, "ab"))
                    # The process holds this lock, so a killed run leaves no lock behind.
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield
            finally:
                if rank() == 0 and not had_start:
                    shutil.rmtree(start, ignore_errors=True)
                if rank() == 0 and not os.path.lexists(self.path / RUN_FILE):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        if is_new:
                            self.path.rmdir()

    def clear(self) -> None:
        """Remove what a run has made, except run.json. If a name is a link, its target stays.

        Raises:
            SaveError: something cannot be removed.
        """
        for path in (self.path / (name + end) for name in OWNED for end in ("", PART)):
            with writing(path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def read_settings(self) -> dict[str, Any] | None:
        """Return the content of run.json, or None if nothing has this name.

        Raises:
            CheckpointError: the file cannot be read, or is of another version.
        """
        file = self.path / RUN_FILE
        found = read_json_if_present(file, CheckpointError)
        if found is not None and found.get("format") != RUN_FORMAT:
            raise CheckpointError(
                f"{file}: format: {short_repr(found.get('format'))} is of another version of "
                f"ligermodels, which has to resume this run; this one reads format {RUN_FORMAT}"
            )
        return found

    def write_settings(self, settings: Mapping[str, Any], config: str | None = None) -> None:
        """Write run.json, and the text of run.yaml, if it is given."""
        text = json.dumps(settings, indent=2) + "\n"
        atomic_write(self.path / RUN_FILE, lambda part: part.write_text(text, "utf-8"))
        if config is not None:
            atomic_write(self.path / "run.yaml", lambda part: part.write_text(config, "utf-8"))

    def log(self, entry: Metrics) -> None:
        """Append a line to metrics.jsonl."""
        if rank() == 0:
            self.metrics.append(entry)
            if self.listener is not None:
                self.listener(entry)


def plot_losses(metrics: list[Metrics], file: Path, title: str = "") -> bool:
    """Draw the losses and the learning rate; without matplotlib, only return False.

    The loss of each step is faint, and its mean over a twentieth of the steps is not.
    """
    nan = math.nan
    points = [(e["step"], e["loss"], e.get("learning_rate", nan)) for e in metrics if "loss" in e]
    held = [(e["step"], e["eval_loss"]) for e in metrics if "eval_loss" in e]
    try:
        with picture(8, 5) as figure:
            upper, lower = figure.subplots(2, sharex=True, height_ratios=(4, 1))
            if points:
                steps, losses, rates = zip(*points)
                window = max(1, len(steps) // 20)
                sums = np.cumsum([0.0, *losses])
                ends = np.arange(1, len(steps) + 1)
                starts = np.maximum(0, ends - window)
                means = (sums[ends] - sums[starts]) / (ends - starts)
                upper.plot(steps, losses, color=OURS, alpha=0.4, linewidth=1)
                label = "training" + f", mean of {window} steps" * (window > 1)
                upper.plot(steps, means, color=OURS, label=f"{label}: {means[-1]:.3f}")
                lower.plot(steps, rates, color=INK)
            if held:
                label = f"held out: {held[-1][1]:.3f}"
                upper.plot(*zip(*held), color=ORDER[1], marker="o", label=label)
            upper.set(title=title, ylabel="loss (nats per token)" if held else "loss")
            lower.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
            lower.xaxis.get_major_locator().set_params(integer=True)
            lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
            upper.grid()
            if points or held:
                upper.legend()
            atomic_write(file, lambda path: figure.savefig(path, format="png", dpi=120))
    except ModuleNotFoundError:
        return False
    return True


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into a SaveError that names the file.

    Raises:
        SaveError: the write has failed.
        LigerError: another process has a lock on the file.
    """
    try:
        yield
    except SaveError:
        raise
    except BlockingIOError:
        raise LigerError(f"{path}: another process is writing to it") from None
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"{path}: cannot be written: {reason}") from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file beside `path`, then replace `path` by it in one step.

    Raises:
        SaveError: the file cannot be written; `path` is unchanged.
    """
    aside = path.with_name(path.name + PART)
    try:
        with writing(path):
            # A kill may have left a part, and a link of this name would lead to another file.
            aside.unlink(missing_ok=True)
            write(aside)
            sync_file(aside)
            os.replace(aside, path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def file_hash(path: str | Path, kind: type[LigerError] = DataError) -> str:
    """Return the SHA-256 of a file.

    Raises:
        kind: the file cannot be read.
    """
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    with open_regular(Path(path), kind) as file:
        try:
            while piece := file.read(1 << 20):
                digest.update(piece)
        except OSError as error:
            raise kind(f"{path}: the file cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
