"""The folder of a training run: its settings, metrics and checkpoints. A kill damages none.

    run.json        the options of the run, and the hashes of its data
    metrics.jsonl   one line per step and per evaluation
    checkpoints/    step-00000100.safetensors: weights and optimizer state after that step
    model/          the export
    loss.png        the loss curve

A file is written beside its final name, flushed to the disk and renamed. A reader therefore finds
the old file or the new file, and never a part. Only metrics.jsonl grows in place. On resume it is
cut back to the checkpoint's step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ligermodels.converters.files import read_json, sync_file, sync_folder
from ligermodels.errors import CheckpointError, LigerError, SaveError, listing

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
LOSS_PLOT = "loss.png"
LOCK_FILE = ".lock"
OWNED = (RUN_FILE, METRICS_FILE, CHECKPOINTS, MODEL, LOSS_PLOT)

# One line of metrics.jsonl: the "step", and the values measured at it, such as "loss".
Metrics = dict[str, float]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write into a SaveError that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"{path}: cannot be written: {reason}") from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then replace `path` by it in one step.

    Raises:
        SaveError: the file cannot be written; `path` is unchanged.
    """
    aside = path.with_name(path.name + ".part")
    try:
        with _writing(path):
            write(aside)
            # safetensors ignores the umask: it creates files that only their owner can read.
            umask = os.umask(0o077)
            os.umask(umask)
            os.chmod(aside, 0o666 & ~umask)
            sync_file(aside)
            os.replace(aside, path)
            sync_folder(path.parent)
    except SaveError:
        aside.unlink(missing_ok=True)
        raise


class RunDir:
    """The folder of one run, at `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_file = self.path / METRICS_FILE
        self.model_dir = self.path / MODEL
        self.loss_plot = self.path / LOSS_PLOT
        self.checkpoint_dir = self.path / CHECKPOINTS

    def existing(self) -> list[str]:
        """Return the names of a run's files that exist already."""
        return [name for name in OWNED if os.path.lexists(self.path / name)]

    def check(self, resume: bool, overwrite: bool, inputs: Iterable[tuple[str, Path]]) -> None:
        """Raise LigerError if the folder must not be written to. Nothing has been loaded yet.

        `inputs` are pairs of a name and a path that the run reads. The run must not write among the
        model's files, and overwriting must not remove any input.
        """
        if self.path.exists() and not self.path.is_dir():
            raise LigerError(f"{self.path}: this is a file, but the output must be a folder")
        found = self.existing()
        if found and not resume and not overwrite:
            raise LigerError(
                f"{self.path}: the folder holds another run ({', '.join(found)}); resume it "
                "(--resume), overwrite it (--overwrite-output-dir), or choose another folder"
            )
        if resume and found and RUN_FILE not in found:
            raise LigerError(
                f"{self.path}: the folder holds {', '.join(found)} but no {RUN_FILE}, so there is "
                "no run that can be resumed; overwrite it (--overwrite-output-dir), or choose "
                "another folder"
            )
        for what, source in inputs:
            if what == "model" and source.is_dir() and source.resolve() == self.path.resolve():
                raise LigerError(
                    f"{self.path}: this is the checkpoint to start from; choose another folder for "
                    "the run, so that their files do not mix"
                )
            for name in found if overwrite else ():
                owned = (self.path / name).resolve()
                if source.resolve() == owned or owned in source.resolve().parents:
                    raise LigerError(
                        f"{source}: overwriting {self.path} would remove the {what} that the run "
                        "reads; choose another folder"
                    )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other processes from writing to it inside the context."""
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK_FILE, "w")
        with lock:
            try:
                import fcntl

                # The process holds this lock, so a killed run leaves no lock behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass
            except BlockingIOError:
                raise LigerError(
                    f"{self.path}: another process is writing a run to this folder"
                ) from None
            yield

    def clear(self) -> None:
        """Remove only a run's files, the settings last, because they mark the folder as a run."""
        for name in reversed(self.existing()):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def read_settings(self) -> dict[str, Any] | None:
        """Return the content of run.json, or None if the file does not exist.

        Raises:
            CheckpointError: the file cannot be read, or it does not describe a run.
        """
        file = self.path / RUN_FILE
        if not file.is_file():
            return None
        found = read_json(file, CheckpointError)
        if not isinstance(found.get("settings"), dict):
            raise CheckpointError(
                f"{file}: settings: the key is missing, so this is no run of ligermodels"
            )
        return found

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write run.json."""
        text = json.dumps(settings, indent=2) + "\n"
        atomic_write(self.path / RUN_FILE, lambda file: file.write_text(text, encoding="utf-8"))

    def log(self, entry: Metrics) -> None:
        """Append a line to metrics.jsonl."""
        with _writing(self.metrics_file), open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def read_metrics(self) -> list[Metrics]:
        """Return the lines of metrics.jsonl, without a last line that a kill cut short."""
        if not self.metrics_file.is_file():
            return []
        entries = []
        for line in self.metrics_file.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if line.endswith(b"\n") and isinstance(entry, dict) and "step" in entry:
                entries.append(entry)
        return entries

    def cut_metrics(self, step: int) -> None:
        """Remove every metric after `step`; a negative step removes all."""
        lines = [json.dumps(entry) + "\n" for entry in self.read_metrics() if entry["step"] <= step]
        atomic_write(
            self.metrics_file, lambda file: file.write_text("".join(lines), encoding="utf-8")
        )

    def latest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the highest step, or None if there is none."""
        return max(self._all_checkpoints(), default=None)

    def _all_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoint_dir.glob("step-*.safetensors"))

    def save_checkpoint(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: int
    ) -> Path:
        """Write the state after `step` steps, then keep only the newest `keep` checkpoints."""
        tensors = dict(named_state(model, optimizer))
        file = self.checkpoint_dir / f"step-{step:08d}.safetensors"
        with _writing(file):
            self.checkpoint_dir.mkdir(exist_ok=True)
            if self.metrics_file.is_file():
                # If the checkpoint survives a power cut, its metrics must survive, too.
                sync_file(self.metrics_file)
        atomic_write(file, lambda path: save_file(tensors, path, {"step": str(step)}))
        self.prune(keep)
        return file

    def prune(self, keep: int) -> None:
        """Remove all except the newest `keep` checkpoints, and files that a kill cut short."""
        for old in [*self._all_checkpoints()[:-keep], *self.checkpoint_dir.glob("*.part")]:
            old.unlink()


def named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that resuming needs: the weights and the optimizer's state, by name."""
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{key}.{name}", value.detach()


def load_checkpoint(file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Copy a checkpoint into the model and a fresh, fused AdamW, and return the checkpoint's step.

    Raises:
        CheckpointError: the file is damaged or belongs to another model; nothing was changed.
    """
    try:
        with safe_open(file, framework="pt") as checkpoint:
            held = {name: checkpoint.get_slice(name).get_shape() for name in checkpoint.keys()}
            wanted: dict[str, list[int]] = {}
            for name, parameter in model.named_parameters():
                for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                    wanted[f"{kind}.{name}"] = list(parameter.shape)
                wanted[f"optimizer.step.{name}"] = []
            names = sorted(held.keys() | wanted.keys())
            wrong = [name for name in names if held.get(name) != wanted.get(name)]
            if wrong:
                raise CheckpointError(
                    f"{file}: {wrong[0]}: the checkpoint belongs to another model\n{listing(wrong)}"
                )
            step = int((checkpoint.metadata() or {})["step"])
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(checkpoint.get_tensor(f"model.{name}"))
                    state = optimizer.state[parameter]
                    for key in ("exp_avg", "exp_avg_sq"):
                        # Allocate as the optimizer does: a kernel may round differently on memory
                        # with another alignment.
                        state[key] = torch.empty_like(parameter)
                        state[key].copy_(checkpoint.get_tensor(f"optimizer.{key}.{name}"))
                    # A fused optimizer keeps its step count on the parameter's device.
                    count = checkpoint.get_tensor(f"optimizer.step.{name}")
                    state["step"] = count.to(parameter.device)
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error}; remove the file to resume from an earlier checkpoint"
        ) from None
    return step


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
