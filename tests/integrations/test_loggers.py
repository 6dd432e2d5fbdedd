"""Loggers by name, with stand-ins for the packages."""

from __future__ import annotations

import csv
import shutil
import sys
from types import SimpleNamespace

import pytest

from ligermodels.errors import ConfigError, LigerError
from ligermodels.integrations.loggers import loggers_by_name
from tests.training.tiny_run import make_checkpoint, make_text, run


class Board:
    """A stand-in for TensorBoard's writer and for wandb's run."""

    made: list[Board] = []

    def __init__(self, *given, **options):
        self.given, self.options, self.entries, self.closed = given, options, [], False
        self.id = options.get("id") or "new"
        self.made.append(self)

    def add_text(self, name, text):
        self.entries.append((name, text))

    def add_scalar(self, name, value, step):
        self.entries.append((name, value, step))

    def log(self, values, step):
        self.entries.append((values, step))

    def close(self):
        self.closed = True

    finish = end_run = close

    def log_metrics(self, values, step):
        self.entries.append((values, step))

    def log_params(self, settings):
        self.settings = settings

    def set_experiment(self, name):
        self.experiment = name

    def start_run(self, **options):
        self.options = options
        return SimpleNamespace(info=SimpleNamespace(run_id=options["run_id"] or "new"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture
def board(monkeypatch):
    Board.made = []
    module = SimpleNamespace(SummaryWriter=Board)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Board))
    return Board


def test_a_run_tells_both_what_it_measures(checkpoint, text, tmp_path, board, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    given = {"max_steps": 2, "save_steps": 1, "report_to": ["tensorboard", "wandb"]}
    done = run(checkpoint, text, tmp_path / "run", **given)
    written, sent = board.made
    assert written.given == (str(tmp_path / "run" / "tensorboard"),) and written.closed
    assert written.options == {"purge_step": 0}  # another run may have been in the folder
    assert ("loss", done.metrics[1]["loss"], 1) in written.entries
    assert [entry["step"] for entry in done.metrics] == [step for _, step in sent.entries]
    assert sent.entries[0][0] == {k: v for k, v in done.metrics[0].items() if k != "step"}
    assert sent.options["project"] == "mine" and sent.options["name"] == "run"
    assert sent.options["config"]["max_steps"] == 2 and sent.closed

    shutil.rmtree(tmp_path / "run/checkpoints/step-00000002")
    run(checkpoint, text, tmp_path / "run", **given, resume=True)
    _, _, written, sent = board.made
    assert written.options == {"purge_step": 2}  # what step 1 wrote is not written again
    assert sent.options["id"] == "new" and sent.options["resume"] == "allow"
    assert {step for _, step in sent.entries} == {2}


def test_mlflow_and_a_csv_file(checkpoint, text, tmp_path, board, monkeypatch):
    mlflow = Board()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    given = {"max_steps": 2, "save_steps": 1, "report_to": ["mlflow", "csv"]}
    done = run(checkpoint, text, tmp_path / "run", **given)
    assert mlflow.experiment == "ligermodels" and mlflow.closed
    assert mlflow.options == {"run_id": None, "run_name": "run"}
    assert mlflow.settings["max_steps"] == 2
    assert [step for _, step in mlflow.entries] == [entry["step"] for entry in done.metrics]

    shutil.rmtree(tmp_path / "run/checkpoints/step-00000002")
    mlflow.entries.clear()
    done = run(checkpoint, text, tmp_path / "run", **given, resume=True)
    assert mlflow.options == {"run_id": "new", "run_name": None}
    assert {step for _, step in mlflow.entries} == {2}
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = [(int(r["step"]), r["metric"], float(r["value"])) for r in csv.DictReader(file)]
    written = [(e["step"], k, v) for e in done.metrics for k, v in e.items() if k != "step"]
    assert sorted(rows) == sorted(written)


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch, tmp_path):
    for module in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(ConfigError, match=rf"report_to: {name} needs {name}, .* pip install"):
            loggers_by_name([name])


def test_a_logger_that_fails_does_not_end_the_run(checkpoint, text, tmp_path, board, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no connection\nat all")

    given = {"max_steps": 2, "report_to": ["tensorboard", "wandb"]}
    monkeypatch.setattr(Board, "log", fails)
    monkeypatch.setattr(Board, "finish", fails)
    with pytest.warns(UserWarning, match="WandbLogger fails, and gets no more .*: no connection$"):
        done = run(checkpoint, text, tmp_path / "run", **given)
    assert done.steps == 2 and len(Board.made[0].entries) > 2
    monkeypatch.setattr(Board, "__init__", fails)
    with pytest.raises(LigerError, match="TensorBoardLogger cannot be opened: no connection"):
        run(checkpoint, text, tmp_path / "other", **given)
