"""The folder of a training run: its settings and metrics. A kill damages none.

    run.json        the options of the run, and the hashes of its model and data
    run.yaml        the options, for `ligermodels finetune --config`
    metrics.jsonl   one line per step and per evaluation
    samples.jsonl   texts that the model generated at evaluations
    checkpoints/    step-00000100/: weights and optimizer state after that step
    reference/      log-probabilities of the reference model
    model/          the export
    loss.png        the loss curve
    profile/        a trace of some steps
    tensorboard/    event files of TensorBoard

A file is written beside its final name, flushed to the disk and renamed. A reader therefore finds
the old file or the new file, and never a part. Only metrics.jsonl grows in place. On resume it is
cut back to the checkpoint's step. Only files that a run has made are removed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ligermodels.converters.checkpoint_files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    COPIED_FILES,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SHARD_NAME,
)
from ligermodels.converters.files import (
    is_int,
    is_number,
    names_if_present,
    open_if_present,
    parse_json,
    read_json_if_present,
    sync_file,
)
from ligermodels.errors import CheckpointError, LigerError, SaveError, printable, short_repr
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.files import PART, atomic_write, writing
from ligermodels.training.preferences import remove_stored

RUN_FILE = "run.json"
CONFIG_FILE = "run.yaml"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
LOSS_PLOT = "loss.png"
REFERENCE = "reference"
PROFILE = "profile"
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb_id"
LOCK_FILE = ".lock"
OWNED = (
    *(RUN_FILE, CONFIG_FILE, METRICS_FILE, SAMPLES_FILE),
    *(CHECKPOINTS, REFERENCE, MODEL, LOSS_PLOT, PROFILE, TENSORBOARD, WANDB_ID),
)

# The version of run.json and of the checkpoints. A run of another one is not resumed.
RUN_FORMAT = 2

# run.json has these keys, with values of these types.
_RUN_KEYS: dict[str, tuple[type, ...]] = {
    "settings": (dict,),  # the options of the run
    "base": (dict,),  # hash of each part of the model that the run started from
    "files": (dict,),  # SHA-256 of each training file
    "rows": (str,),  # hash of the packed rows
    "steps": (int,),  # number of steps of the whole run
    "memory_plan": (dict, type(None)),
    "exported": (bool,),  # whether the run has begun to write model/
    "ranks": (int,),  # how many processes, or groups of them, had their own rows at its start
    "launch": (str, type(None)),  # which start of torchrun has begun or resumed it, if one has
    "ligermodels": (str,),  # the version
    "format": (int,),  # RUN_FORMAT
}

# One line of metrics.jsonl: the "step", and the values measured at it, such as "loss".
Metrics = dict[str, float]


class RunDir:
    """The folder of one run, at `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / CONFIG_FILE
        self.metrics_file = self.path / METRICS_FILE
        self.samples_file = self.path / SAMPLES_FILE
        self.listeners: list[Callable[[Metrics], object]] = []  # they get each line of metrics
        self.model_dir = self.path / MODEL
        self.loss_plot = self.path / LOSS_PLOT
        self.checkpoint_dir = self.path / CHECKPOINTS
        self.reference_dir = self.path / REFERENCE
        self.profile_dir = self.path / PROFILE

    def existing(self) -> list[str]:
        """Return the names of a run's files that exist already."""
        return [name for name in OWNED if os.path.lexists(self.path / name)]

    def check(self, resume: bool, overwrite: bool, inputs: Iterable[tuple[str, Path]]) -> None:
        """Raise LigerError if the folder must not be written to. Nothing has been loaded yet.

        `inputs` are pairs of a name and a path that the run reads. The run must not write among the
        model's files or among others in the current directory, and overwriting must not remove any
        input or anything that no run has made.
        """
        try:
            self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:  # The name is too long, or has a null byte.
            reason = getattr(error, "strerror", None) or error
            name = printable(str(self.path))
            raise SaveError(f"{name}: this cannot be the output folder: {reason}") from None
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise LigerError(f"{self.path}: this is not a folder, but the output must be one")
        found = self.existing()
        listed = ", ".join(found)
        elsewhere = "or choose another folder (--output-dir)"
        if found and RUN_FILE not in found:
            raise LigerError(
                f"{self.path}: the folder holds {listed} but no {RUN_FILE}, so no run has made "
                f"this; move it away, {elsewhere}"
            )
        if found and not resume and not overwrite:
            raise LigerError(
                f"{self.path}: the folder holds another run ({listed}); resume it (--resume), "
                f"overwrite it (--overwrite-output-dir), {elsewhere}"
            )
        if os.path.lexists(self.model_dir) and not self.model_dir.is_dir():
            raise LigerError(f"{self.model_dir}: this is not a folder; move it away")
        if (saved := self.read_settings()) and not saved["exported"] and self._exported():
            raise LigerError(
                f"{self.model_dir}: the run has not exported anything yet, so it has not made "
                f"this; move it away, {elsewhere}"
            )
        if os.path.ismount(self.model_dir) or _is_within(Path.cwd(), self.model_dir):
            raise LigerError(
                f"{self.model_dir}: the export replaces this folder, so it must not be a mount "
                "point or contain the current directory"
            )
        others = set(names_if_present(self.path, CheckpointError) or ()) - {*found, LOCK_FILE}
        if others and not found and _is_within(Path.cwd(), self.path):
            raise LigerError(
                f"{self.path}: the current directory is in this folder and other files are there; "
                "choose a folder for the run alone (--output-dir)"
            )
        for what, source in inputs:
            try:
                real = Path(os.path.realpath(source))
            except ValueError:  # No path can have this name, so it is refused where it is read.
                continue
            if (
                what == "model"
                and os.path.isdir(source)
                and real == Path(os.path.realpath(self.path))
            ):
                raise LigerError(
                    f"{self.path}: this is the checkpoint to start from; choose another folder for "
                    "the run, so that their files do not mix"
                )
            for name in found if overwrite else ():
                if _is_within(real, self.path / name):
                    raise LigerError(
                        f"{source}: overwriting {self.path} would remove the {what} that the run "
                        "reads; choose another folder"
                    )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other processes from writing to it inside the context.

        If no run has begun when the context ends, what was created here is removed again.
        """
        path = self.path / LOCK_FILE
        # Never through a link, and without a change to what is there.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with writing(path):
            new_folder = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            new_lock = not os.path.lexists(path)
            lock = open(os.open(path, flags, 0o666), "rb", buffering=0)
        with lock:
            if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
                raise LigerError(f"{path}: this is not a regular file; remove it")
            try:
                import fcntl

                # The process holds this lock, so a killed run leaves no lock behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.path.samestat(os.fstat(lock.fileno()), os.lstat(path))
            except ImportError:  # Windows has no such lock.
                is_ours = True
            except (BlockingIOError, FileNotFoundError):
                is_ours = False
            if not is_ours:
                raise LigerError(f"{self.path}: another process is writing a run to this folder")
            try:
                yield
            finally:
                if not self.existing():
                    with contextlib.suppress(OSError):  # The folder may hold the user's files.
                        if new_lock:
                            path.unlink()
                        if new_folder:
                            self.path.rmdir()

    def clear(self) -> None:
        """Remove what a run has made, the settings last, because they mark the folder as a run.

        Other files stay. If a name is a link, its target stays.

        Raises:
            SaveError: something cannot be removed.
        """
        for file in (self.loss_plot, self.metrics_file, self.samples_file, self.config_file):
            _remove(file.with_name(file.name + PART))
            _remove(file)
        for folder, clear in (
            (self.checkpoint_dir, lambda: Checkpoints(self.checkpoint_dir).clear()),
            (self.reference_dir, lambda: remove_stored(self.reference_dir)),
            (self.model_dir, self._clear_model),
        ):
            if folder.is_symlink():
                _remove(folder)
            else:
                clear()
        _remove_files(self.profile_dir, "t[ra]*")
        _remove_files(self.path / TENSORBOARD, "events.out.tfevents.*")
        _remove(self.path / WANDB_ID)
        _remove(self.path / RUN_FILE)

    def _clear_model(self) -> None:
        for name in self._exported():
            _remove(self.model_dir / name)
        for folder in (self.model_dir / CHAT_TEMPLATE_DIR, self.model_dir):
            with contextlib.suppress(OSError):  # It is absent, or something else is in it.
                folder.rmdir()

    def _exported(self) -> list[str]:
        """Return the names in model/ that an export writes."""
        own = {CONFIG_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, *COPIED_FILES}
        own |= {ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME}
        names = names_if_present(self.model_dir, CheckpointError) or []
        found = [name for name in names if name in own or SHARD_NAME.fullmatch(name)]
        if CHAT_TEMPLATE_DIR in names:
            templates = names_if_present(self.model_dir / CHAT_TEMPLATE_DIR, CheckpointError) or []
            found += [f"{CHAT_TEMPLATE_DIR}/{name}" for name in templates]
        return found

    def read_settings(self) -> dict[str, Any] | None:
        """Return the content of run.json, or None if nothing has this name.

        Raises:
            CheckpointError: the file cannot be read, or it does not describe a run.
        """
        file = self.path / RUN_FILE
        found = read_json_if_present(file, CheckpointError)
        if found is None:
            return None
        for key, kind in _RUN_KEYS.items():
            if key not in found:
                raise CheckpointError(
                    f"{file}: {key}: the key is missing, so this is no run of ligermodels, or one "
                    "of an older version; move the folder away, or choose another one"
                )
            value = found[key]
            texts = value.values() if key in ("base", "files") and isinstance(value, dict) else ()
            if type(value) not in kind or not all(isinstance(text, str) for text in texts):
                raise CheckpointError(
                    f"{file}: {key}: {short_repr(value)} is not what a run writes; restore the file"
                )
        if found["format"] != RUN_FORMAT:
            raise CheckpointError(
                f"{file}: format: {found['format']} is of another version of ligermodels, which "
                f"has to resume this run; this one reads format {RUN_FORMAT}"
            )
        return found

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write run.json."""
        _write_text(self.path / RUN_FILE, json.dumps(settings, indent=2) + "\n")

    def write_config(self, text: str) -> None:
        """Write run.yaml."""
        _write_text(self.config_file, text)

    def log(self, entry: Metrics) -> None:
        """Append a line to metrics.jsonl."""
        with writing(self.metrics_file), open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        for listener in [*self.listeners]:
            listener(entry)

    def sync_metrics(self) -> None:
        """Flush metrics.jsonl to the disk: what a checkpoint goes on from must not be lost."""
        if self.metrics_file.is_file():
            with writing(self.metrics_file):
                sync_file(self.metrics_file)

    def read_metrics(self) -> list[Metrics]:
        """Return the lines of metrics.jsonl, without a last line that a kill cut short.

        Raises:
            CheckpointError: the file cannot be read, or a line is not one that a run writes.
        """
        return [
            _entry(line, where, lambda entry: all(map(is_number, entry.values())))
            for line, where in _lines(self.metrics_file)
        ]

    def log_samples(self, step: int, samples: Iterable[Mapping[str, str]]) -> None:
        """Append texts to samples.jsonl."""
        lines = (json.dumps({"step": step, **sample}, ensure_ascii=False) for sample in samples)
        with writing(self.samples_file), open(self.samples_file, "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def sampled_steps(self, last: int) -> set[int]:
        """Return the steps up to `last` of which samples.jsonl has texts, and remove the others.

        Raises:
            CheckpointError: the file cannot be read, or a line is not one that a run writes.
        """
        if not os.path.lexists(self.samples_file):
            return set()
        steps = [(_entry(*each)["step"], each[0]) for each in _lines(self.samples_file)]
        kept = [(step, line.decode()) for step, line in steps if step <= last]
        _write_text(self.samples_file, "".join(f"{line}\n" for _, line in kept))
        return {step for step, _ in kept}

    def cut_metrics(self, step: int) -> None:
        """Remove every metric after `step`; a negative step removes all."""
        lines = [json.dumps(entry) + "\n" for entry in self.read_metrics() if entry["step"] <= step]
        _write_text(self.metrics_file, "".join(lines))


def _lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yield the lines of a file and their places, without a last one that a kill cut short."""
    file = open_if_present(path, CheckpointError)
    if file is None:
        return
    with file:
        lines = io.BufferedReader(file).read().split(b"\n")[:-1]
    yield from ((line, f"{path}:{number}") for number, line in enumerate(lines, start=1))


def _entry(
    line: bytes, where: str, fits: Callable[[dict[str, Any]], bool] = lambda entry: True
) -> dict[str, Any]:
    """Return the object of a line, which has a step and fits, or raise CheckpointError."""
    try:
        entry = parse_json(line, where, CheckpointError)
        if not (is_int(entry.get("step")) and fits(entry)):
            raise CheckpointError(f"{where}: {short_repr(entry)} is not a line that a run writes")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; restore or remove the file") from None
    return entry


class ReadOnlyRunDir(RunDir):
    """The folder of a run for the ranks that write nothing to it, because rank 0 does."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Do nothing: rank 0 has the lock."""
        yield

    def _nothing(self, *_: Any) -> None:
        """Do nothing."""

    clear = sync_metrics = _nothing
    write_settings = write_config = log = cut_metrics = _nothing  # type: ignore[assignment]


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether the real path is the real folder or is in it."""
    real = Path(os.path.realpath(folder))
    path = Path(os.path.realpath(path))
    return path == real or real in path.parents


def _remove_files(folder: Path, pattern: str) -> None:
    """Remove the files of a folder whose names match, and the folder if it is empty then."""
    if folder.is_symlink():
        _remove(folder)
        return
    for path in folder.glob(pattern):
        _remove(path)
    with contextlib.suppress(OSError):  # It is absent, or something else is in it.
        folder.rmdir()


def _write_text(path: Path, text: str) -> None:
    atomic_write(path, lambda file: file.write_text(text, encoding="utf-8"))


def _remove(path: Path) -> None:
    """Remove a file or a link, if it is there."""
    with writing(path):
        path.unlink(missing_ok=True)


def plot_losses(metrics: list[Metrics], file: Path) -> bool:
    """Draw the loss of every step and evaluation; without matplotlib, only return False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, label, style in (
        ("loss", "training", {"linewidth": 1.0}),
        ("eval_loss", "held out", {"marker": "o", "linewidth": 1.5}),
    ):
        points = [(entry["step"], entry[key]) for entry in metrics if key in entry]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    atomic_write(file, lambda path: figure.savefig(path, format="png", dpi=120))
    return True
