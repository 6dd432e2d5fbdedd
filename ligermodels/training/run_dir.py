"""The folder of a training run: its settings, its metrics and its checkpoints, all safe to kill.

    run.json        what was asked for, and hashes of what it was asked on
    metrics.jsonl   one line per step and per evaluation
    checkpoints/    step-00000100.safetensors: weights and optimizer state after that step
    model/          the export
    loss.png        the loss curve

A file is written beside its final name, flushed to the disk and renamed, so a reader finds the old
one or the new one and never a part. The one file that grows in place, metrics.jsonl, is cut back to
the checkpoint's step on resume.
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

# One line of metrics.jsonl: "step", and what was measured there under names such as "loss".
Metrics = dict[str, float]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say which file the disk refuses."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SaveError(f"{path}: cannot be written: {reason}") from error


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside `path`, then put it in `path`'s place in one step.

    Raises:
        SaveError: the disk refuses; `path` is as it was.
    """
    aside = path.with_name(path.name + ".part")
    try:
        with _writing(path):
            write(aside)
            # safetensors creates its files readable by their owner alone, whatever the umask says.
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
    """The folder `path` of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics_file = self.path / METRICS_FILE
        self.model_dir = self.path / MODEL
        self.loss_plot = self.path / LOSS_PLOT
        self.checkpoint_dir = self.path / CHECKPOINTS

    def existing(self) -> list[str]:
        """Names of a run's files that exist already."""
        return [name for name in OWNED if os.path.lexists(self.path / name)]

    def check(self, resume: bool, overwrite: bool, inputs: Iterable[tuple[str, Path]]) -> None:
        """Refuse, before anything is loaded, a folder that must not be written to.

        `inputs` are what the run reads and what it calls them: the run must not be written among
        the model's files, and overwriting must not remove any of them.
        """
        if self.path.exists() and not self.path.is_dir():
            raise LigerError(f"{self.path}: is a file, the output must be a folder")
        found = self.existing()
        if found and not resume and not overwrite:
            raise LigerError(
                f"{self.path}: holds another run ({', '.join(found)}); resume it, overwrite it, or "
                "choose another folder"
            )
        if resume and found and RUN_FILE not in found:
            raise LigerError(
                f"{self.path}: holds {', '.join(found)} but no {RUN_FILE}, so it is not a run that "
                "can be resumed"
            )
        for what, source in inputs:
            if what == "model" and source.is_dir() and source.resolve() == self.path.resolve():
                raise LigerError(
                    f"{self.path}: is the checkpoint to start from; choose another folder for the "
                    "run, so that the two do not mix"
                )
            for name in found if overwrite else ():
                owned = (self.path / name).resolve()
                if source.resolve() == owned or owned in source.resolve().parents:
                    raise LigerError(
                        f"{source}: overwriting {self.path} would remove the {what} it is made from"
                    )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other processes from writing to it meanwhile."""
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK_FILE, "w")
        with lock:
            try:
                import fcntl

                # held by the process, not by the file: a killed run leaves no lock behind
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass
            except BlockingIOError:
                raise LigerError(f"{self.path}: another process is training into it") from None
            yield

    def clear(self) -> None:
        """Remove what a run wrote and nothing else; the settings go last, to mark it as a run."""
        for name in reversed(self.existing()):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def read_settings(self) -> dict[str, Any] | None:
        """What run.json holds; None when there is no such file.

        Raises:
            CheckpointError: the file cannot be read, or is not that of a run.
        """
        file = self.path / RUN_FILE
        if not file.is_file():
            return None
        found = read_json(file, CheckpointError)
        if not isinstance(found.get("settings"), dict):
            raise CheckpointError(f"{file}: settings: missing, this is not a run of ligermodels")
        return found

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write run.json."""
        text = json.dumps(settings, indent=2) + "\n"
        atomic_write(self.path / RUN_FILE, lambda file: file.write_text(text, encoding="utf-8"))

    def log(self, entry: Metrics) -> None:
        """Add a line to metrics.jsonl."""
        with _writing(self.metrics_file), open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def read_metrics(self) -> list[Metrics]:
        """The whole lines of metrics.jsonl; a last line that a kill cut short is left out."""
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
        """Forget every metric after `step`; a negative step forgets all."""
        lines = [json.dumps(entry) + "\n" for entry in self.read_metrics() if entry["step"] <= step]
        atomic_write(
            self.metrics_file, lambda file: file.write_text("".join(lines), encoding="utf-8")
        )

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, if there is one."""
        return max(self._all_checkpoints(), default=None)

    def _all_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoint_dir.glob("step-*.safetensors"))

    def save_checkpoint(
        self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: int
    ) -> Path:
        """Write the state after `step` steps, then remove all but the newest `keep` checkpoints."""
        tensors = dict(named_state(model, optimizer))
        file = self.checkpoint_dir / f"step-{step:08d}.safetensors"
        with _writing(file):
            self.checkpoint_dir.mkdir(exist_ok=True)
            if self.metrics_file.is_file():
                # a checkpoint that survives a power cut must find its metrics there as well
                sync_file(self.metrics_file)
        atomic_write(file, lambda path: save_file(tensors, path, {"step": str(step)}))
        self.prune(keep)
        return file

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and what a kill left half written."""
        for old in [*self._all_checkpoints()[:-keep], *self.checkpoint_dir.glob("*.part")]:
            old.unlink()


def named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor a run goes on from: weights, and the optimizer's state by parameter name."""
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{key}.{name}", value.detach()


def load_checkpoint(file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Copy a checkpoint into the model and a fresh, fused AdamW; returns the checkpoint's step.

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
                    f"{file}: {wrong[0]}: the checkpoint is not of this model\n{listing(wrong)}"
                )
            step = int((checkpoint.metadata() or {})["step"])
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(checkpoint.get_tensor(f"model.{name}"))
                    state = optimizer.state[parameter]
                    for key in ("exp_avg", "exp_avg_sq"):
                        # memory of its own, allocated as the optimizer would: a kernel may give
                        # other last bits on memory that is aligned differently
                        state[key] = torch.empty_like(parameter)
                        state[key].copy_(checkpoint.get_tensor(f"optimizer.{key}.{name}"))
                    # a fused optimizer counts its steps on the parameter's device
                    count = checkpoint.get_tensor(f"optimizer.step.{name}")
                    state["step"] = count.to(parameter.device)
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error}; remove it to resume from the checkpoint before it"
        ) from None
    return step


def plot_losses(metrics: list[Metrics], file: Path) -> bool:
    """Draw the loss of every step and evaluation; False, and nothing, without matplotlib."""
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
