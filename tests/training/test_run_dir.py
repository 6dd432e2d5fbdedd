"""The run folder: its settings, its metrics, and the folders that a run refuses."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from ligermodels.errors import CheckpointError, LigerError, SaveError
from ligermodels.training.run_dir import (
    OWNED,
    RUN_FORMAT,
    RunDir,
    atomic_write,
    plot_losses,
    writing,
)

SETTINGS = {"format": RUN_FORMAT}


@pytest.fixture
def folder(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def test_lines_are_cut_at_the_step_and_a_torn_one_is_dropped(folder):
    assert folder.metrics.cut(3) == []
    lines = [{"step": step, "loss": step / 3} for step in range(5)]
    for line in lines:
        folder.log(line)
    with open(folder.metrics.path, "a") as opened:
        opened.write('{"step": 5, "lo')
    assert folder.metrics.read() == lines
    assert folder.metrics.cut(2) == lines[:3] == folder.metrics.read()
    assert folder.metrics.cut(-1) == [] and folder.metrics.path.read_text() == ""


@pytest.mark.parametrize("line", ["[]", "", "\0\0"])
def test_lines_that_no_run_writes_are_refused(folder, line):
    folder.metrics.path.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(CheckpointError, match=r"s\.jsonl:2: .*; restore or remove the file"):
        folder.metrics.read()


def test_a_run_begins_in_an_empty_folder_or_its_own(folder):
    folder.check(False, False, [])
    folder.write_settings(SETTINGS, "")
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(LigerError, match="holds another run"):
        folder.check(False, False, [])
    folder.check(True, False, [])
    folder.check(False, True, [])
    (folder.path / "run.json").unlink()
    for resume, overwrite in ((False, False), (True, False), (False, True)):
        with pytest.raises(LigerError, match="the folder is not empty and holds no run"):
            folder.check(resume, overwrite, [])
    for name in ("notes.txt", "run.yaml"):
        (folder.path / name).unlink()
    for left_by_a_kill in (".lock", "run.json.part"):
        (folder.path / left_by_a_kill).touch()
    folder.check(True, False, [])
    (folder.path / "start").mkdir()  # a run would remove it
    with pytest.raises(LigerError, match="holds no run"):
        folder.check(False, False, [])


def test_clearing_removes_a_runs_files_and_writes_through_no_link(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").touch()
    folder.model_dir.symlink_to(elsewhere)
    for name in ("mine", "run.json", *set(OWNED) - {"model"}):
        (folder.path / name).mkdir() if "." not in name else (folder.path / name).touch()
    (folder.checkpoint_dir / "step-00000001").mkdir()
    folder.clear()
    assert sorted(os.listdir(folder.path)) == ["mine", "run.json"]
    assert os.listdir(elsewhere) == ["config.json"]


@pytest.mark.parametrize("name", ["file", "dead link", "x" * 5000])
def test_an_output_that_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "dead link").symlink_to("nowhere")
    with pytest.raises(SaveError, match="cannot be written"), RunDir(tmp_path / name).locked():
        pass


def test_settings_of_another_version_are_refused(folder):
    assert folder.read_settings() is None
    folder.write_settings({"format": RUN_FORMAT - 1}, "")
    with pytest.raises(CheckpointError, match=r"run\.json: format: \d is of another version"):
        folder.read_settings()
    (folder.path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json: .*is not JSON"):
        folder.read_settings()


def test_two_processes_do_not_share_a_folder(folder):
    pytest.importorskip("fcntl")
    with (
        folder.locked(),
        pytest.raises(LigerError, match="another process"),
        RunDir(folder.path).locked(),
    ):
        pass
    with folder.locked():
        pass


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_in_which_no_run_began_is_left_as_it_was(tmp_path, is_new):
    run = RunDir(tmp_path / "run")
    if not is_new:
        run.path.mkdir()
    with run.locked():
        pass
    assert os.listdir(tmp_path) == ([] if is_new else ["run"])
    with run.locked():
        run.write_settings(SETTINGS, "")
    assert sorted(os.listdir(run.path)) == [".lock", "run.json", "run.yaml"]


def test_the_curve_has_whole_steps_and_can_be_read_on_dark_pages(folder, monkeypatch):
    """The background is transparent; the last values are in the legend."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    metrics = [{"step": i, "loss": 3.0 - i / 100, "learning_rate": 1e-3} for i in range(1, 41)]
    metrics.insert(20, {"step": 20, "eval_loss": 2.75})
    assert plot_losses(metrics, folder.path / "loss.png", "tiny: words.txt, 9 tokens")
    upper, lower = drawn[0].axes
    labels = [text.get_text() for text in upper.get_legend().get_texts()]
    assert labels == ["training, mean of 2 steps: 2.605", "held out: 2.750"]
    assert upper.get_title("left") == "tiny: words.txt, 9 tokens"
    assert all(tick == int(tick) for tick in lower.get_xticks())
    assert lower.get_ylabel() == "learning rate"
    image = importlib.import_module("matplotlib.image").imread(folder.path / "loss.png")
    assert image[0, 0, 3] == 0 and image[..., 3].max() > 0.9


def test_without_matplotlib_there_is_no_curve(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot_losses([{"step": 1, "loss": 2.0}], folder.path / "loss.png")
    assert not (folder.path / "loss.png").exists()


@pytest.mark.parametrize(
    "fault, raised, message",
    [
        (OSError(28, "No space left"), SaveError, r"a\.txt: cannot be written: No space left"),
        (KeyboardInterrupt("pressed"), KeyboardInterrupt, "pressed"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, fault, raised, message):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def failing(path):
        path.write_text("half")
        raise fault

    with pytest.raises(raised, match=message):
        atomic_write(file, failing)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_that_names_its_file_is_not_named_again(tmp_path):
    with pytest.raises(SaveError, match=r"^inner$"), writing(tmp_path / "outer"):
        raise SaveError("inner")
