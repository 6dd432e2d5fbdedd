"""Loggers by name: TensorBoard, Weights & Biases, MLflow or a CSV file get a run's metrics."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ligermodels.converters.files import read_if_present
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.training.run_dir import atomic_write


class TensorBoardLogger:
    """Writes event files into the subfolder `tensorboard` of a run.

    Args: folder: the run's folder; start: the step from which a resumed run goes on.
    """

    @staticmethod
    def library() -> Any:
        """Import what writes the files."""
        try:
            return import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            return import_module("tensorboardX").SummaryWriter

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        # TensorBoard hides what older files have from this step on: of another run, all.
        purge = start + 1 if start else 0
        self._writer = self.library()(str(folder / "tensorboard"), purge_step=purge)
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

    @staticmethod
    def library() -> Any:
        """Import the package."""
        return import_module("wandb")

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        file = folder / "wandb_id"
        known = _known(file) if start else None
        self._run = self.library().init(
            project=os.environ.get("WANDB_PROJECT", "ligermodels"),
            name=os.environ.get("WANDB_NAME", folder.name),
            config=dict(settings),
            dir=str(folder),
            id=known,
            resume="allow" if known else None,
        )
        atomic_write(file, lambda part: part.write_text(self._run.id, encoding="utf-8"))

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

    @staticmethod
    def library() -> Any:
        """Import the package."""
        return import_module("mlflow")

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        self._mlflow, file = self.library(), folder / "mlflow_id"
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "ligermodels"))
        known = _known(file) if start else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        atomic_write(file, lambda part: part.write_text(run.info.run_id, encoding="utf-8"))
        if known is None:
            self._mlflow.log_params(dict(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Mark the run as ended."""
        self._mlflow.end_run()


class CsvLogger:
    """Writes `metrics.csv` in the run's folder: a line of step, metric and value for each value."""

    @staticmethod
    def library() -> Any:
        """Return the module of Python that writes the file."""
        return csv

    def __init__(self, folder: Path, settings: Mapping[str, Any], start: int) -> None:
        self._path = folder / "metrics.csv"
        found = read_if_present(self._path, CheckpointError) if start else None
        rows = list(csv.reader((found or b"").decode("utf-8", "replace").splitlines()))[1:]
        kept = [row for row in rows if len(row) == 3 and row[0].isdigit() and int(row[0]) <= start]
        atomic_write(self._path, lambda part: _write(part, [["step", "metric", "value"], *kept]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line for each value."""
        _write(self._path, [[step, name, value] for name, value in values.items()])

    def close(self) -> None:
        """Do nothing: each line is written at once."""


def _write(path: Path, rows: list[Any]) -> None:
    """Add rows to a CSV file."""
    with open(path, "a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _known(file: Path) -> str | None:
    """Return the id of a run that is kept in a file."""
    found = read_if_present(file, CheckpointError)
    return found.decode("utf-8", "replace").strip() or None if found else None


_LOGGERS: dict[str, Any] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "csv": CsvLogger,
}


def loggers_by_name(names: list[str]) -> list[Any]:
    """Return the class of each logger.

    Raises:
        ConfigError: a package is not installed.
    """
    for name in names:
        try:
            _LOGGERS[name].library()
        except ImportError as error:
            raise ConfigError(
                f"report_to: {name} needs {name}, which cannot be imported ({error}); "
                f"pip install {name}"
            ) from None
    return [_LOGGERS[name] for name in names]
