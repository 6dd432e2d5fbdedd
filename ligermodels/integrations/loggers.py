"""Loggers by name: TensorBoard, Weights & Biases, MLflow or a CSV file get a run's metrics."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ligermodels.errors import ConfigError
from ligermodels.training.run_dir import Lines, atomic_write


class TensorBoardLogger:
    """Writes event files into the subfolder `tensorboard` of a run.

    Args: folder: the run's folder; start: the step from which a resumed run goes on.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        # TensorBoard hides what older files have from this step on: of another run, all.
        purge = start + 1 if start else 0
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=purge)
        if not start:
            lines = (f"    {name}: {value}" for name, value in settings.items())
            self._writer.add_text("settings", "\n".join(lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values as scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLogger:
    """Sends metrics to Weights & Biases, whose environment variables say where.

    The project is `ligermodels` unless WANDB_PROJECT names another. A resumed run goes on in the
    same run there, whose id is kept in the folder.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        known = _known(file := folder / "wandb_id", start)
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "ligermodels"),
            name=os.environ.get("WANDB_NAME", folder.name),
            config=dict(settings),
            dir=str(folder),
            id=known,
            resume="allow" if known else None,
        )
        file.write_text(self._run.id, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


class MlflowLogger:
    """Sends metrics to MLflow, whose environment variables say where.

    The experiment is `ligermodels` unless MLFLOW_EXPERIMENT_NAME names another. A resumed run goes
    on in the same run there, whose id is kept in the folder.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        self._mlflow, known = import_module("mlflow"), _known(file := folder / "mlflow_id", start)
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "ligermodels"))
        run = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        file.write_text(run.info.run_id, encoding="utf-8")
        if known is None:
            self._mlflow.log_params(dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Mark the run as ended."""
        self._mlflow.end_run()


class CsvLogger:
    """Writes `metrics.csv` when a run ends or stops: step, metric and value of what it measured."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        self._folder = folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: metrics.jsonl has the values."""

    def close(self) -> None:
        """Write the file."""
        atomic_write(self._folder / "metrics.csv", self._write)

    def _write(self, part: Path) -> None:
        entries = Lines(self._folder / "metrics.jsonl").read()
        with open(part, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("step", "metric", "value"))
            for entry in entries:
                step = entry.pop("step")
                writer.writerows((step, *item) for item in entry.items())


def _known(file: Path, start: int) -> str | None:
    """Return the id that a resumed run has in a file; None for a new one."""
    return file.read_text("utf-8") if start and file.exists() else None


# Name -> the module that the logger uses, and its class.
_LOGGERS: dict[str, tuple[str, Any]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoardLogger),
    "wandb": ("wandb", WandbLogger),
    "mlflow": ("mlflow", MlflowLogger),
    "csv": ("csv", CsvLogger),
}


def loggers_by_name(names: list[str]) -> list[Any]:
    """Return the class of each logger.

    Raises:
        ConfigError: a package is not installed.
    """
    for name in names:
        try:
            import_module(_LOGGERS[name][0])
        except ImportError as error:
            raise ConfigError(
                f"report_to: {name} needs {name}, which cannot be imported ({error}); "
                f"pip install {name}"
            ) from None
    return [_LOGGERS[name][1] for name in names]
