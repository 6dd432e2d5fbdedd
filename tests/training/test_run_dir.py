"""The run folder: its settings, its metrics, and the folders that a run refuses."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from ligermodels.errors import CheckpointError, LigerError, SaveError
from ligermodels.training.preferences import reference_path, stored_log_probs
from ligermodels.training.run_dir import RUN_FORMAT, RunDir, plot_losses

SETTINGS = {
    "settings": {},
    "base": {},
    "files": {},
    "rows": "",
    "steps": 1,
    "memory_plan": None,
    "exported": False,
    "ranks": 1,
    "launch": None,
    "ligermodels": "0",
    "format": RUN_FORMAT,
}


@pytest.fixture
def folder(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def test_metrics_are_cut_at_the_step_and_a_torn_line_is_dropped(folder):
    for step in range(5):
        folder.log({"step": step, "loss": step / 3})
    with open(folder.metrics_file, "a") as file:
        file.write('{"step": 5, "lo')
    assert len(folder.read_metrics()) == 5
    folder.cut_metrics(2)
    assert folder.read_metrics() == [{"step": step, "loss": step / 3} for step in range(3)]
    folder.cut_metrics(-1)
    assert folder.metrics_file.read_text() == ""


def test_lines_of_metrics_that_no_run_writes_are_refused(folder, subtests):
    for line in (
        "[]",
        '{"loss": 1}',
        '{"step": "1"}',
        '{"step": true}',
        '{"step": 1, "loss": "a"}',
        '{"step": 1, "loss": NaN}',
        "",
        "[" * 100_000,
        '{"step": 1, "step": 2}',
        "\0\0",
    ):
        with subtests.test(line[:30]):
            folder.metrics_file.write_text('{"step": 0}\n' + line + "\n")
            with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2: .*; restore or remove"):
                folder.read_metrics()
    folder.metrics_file.write_bytes(b'{"step": 0}\n\0\0\0')
    assert folder.read_metrics() == [{"step": 0}]
    folder.metrics_file.unlink()
    assert folder.read_metrics() == []
    folder.metrics_file.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        folder.read_metrics()


def test_another_run_is_refused_unless_told_otherwise(folder, tmp_path):
    folder.check(False, False, [])
    (folder.path / "notes.txt").write_text("mine")
    folder.check(False, False, [])
    folder.write_settings(SETTINGS)
    with pytest.raises(LigerError, match=r"holds another run \(run\.json\)"):
        folder.check(False, False, [])
    folder.check(True, False, [])
    folder.check(False, True, [])
    folder.clear()
    assert os.listdir(folder.path) == ["notes.txt"]


def test_what_no_run_has_made_is_never_written_over(folder, subtests):
    for name in ("model", "checkpoints", "metrics.jsonl", "loss.png"):
        with subtests.test(name):
            (folder.path / name).mkdir()
            for resume, overwrite in ((False, False), (True, False), (False, True)):
                with pytest.raises(LigerError, match=rf"holds {name} but no run\.json, so no run"):
                    folder.check(resume, overwrite, [])
            (folder.path / name).rmdir()


def test_a_model_that_was_put_into_a_run_is_not_the_runs(folder):
    folder.write_settings(SETTINGS)
    folder.model_dir.mkdir()
    (folder.model_dir / "notes.txt").touch()
    folder.check(True, False, [])
    (folder.model_dir / "model.safetensors").touch()
    for resume in (True, False):
        with pytest.raises(LigerError, match="has not exported anything yet"):
            folder.check(resume, not resume, [])
    folder.write_settings({**SETTINGS, "exported": True})
    folder.check(False, True, [])
    folder.clear()
    assert os.listdir(folder.path) == ["model"] and os.listdir(folder.model_dir) == ["notes.txt"]


def test_clearing_removes_a_runs_files_and_no_others(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").touch()
    (elsewhere / "step-00000001").touch()
    (elsewhere / "trace.json.gz").touch()
    links = [folder.model_dir, folder.checkpoint_dir, folder.reference_dir, folder.profile_dir]
    for path in links:
        path.symlink_to(elsewhere)
    folder.clear()
    assert os.listdir(folder.path) == [] and len(os.listdir(elsewhere)) == 3
    stored = reference_path(folder.reference_dir, "data", "model")
    stored_log_probs(stored, 2, lambda: torch.zeros(2))
    for name in (
        "model/config.json",
        "model/model-00001-of-00002.safetensors",
        "model/additional_chat_templates/a.jinja",
        "model/mine.gguf",
        "checkpoints/step-00000001",
        "checkpoints/best.safetensors",
        "metrics.jsonl",
        "loss.png",
        "run.json",
        "mine",
    ):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).touch()
    folder.clear()
    assert not folder.reference_dir.exists()
    left = [str(path.relative_to(folder.path)) for path in folder.path.rglob("*")]
    assert sorted(left) == [
        "checkpoints",
        "checkpoints/best.safetensors",
        "mine",
        "model",
        "model/mine.gguf",
    ]


def test_the_current_directory_is_not_filled_with_a_run(folder, monkeypatch):
    monkeypatch.chdir(folder.path)
    RunDir(".").check(False, False, [])
    (folder.path / "thesis.tex").touch()
    for path in (".", folder.path, "..", "/"):
        with pytest.raises(LigerError, match="the current directory is in this folder and other"):
            RunDir(path).check(False, False, [])
    folder.write_settings(SETTINGS)
    RunDir(".").check(True, False, [])
    folder.model_dir.mkdir()
    monkeypatch.chdir(folder.model_dir)
    with pytest.raises(LigerError, match="the export replaces this folder"):
        RunDir("..").check(True, False, [])


def test_overwriting_what_the_run_reads_is_refused(folder):
    folder.write_settings({**SETTINGS, "exported": True})
    folder.model_dir.mkdir()
    with pytest.raises(LigerError, match="would remove the model"):
        folder.check(False, True, [("model", folder.model_dir)])
    with pytest.raises(LigerError, match="would remove the training data"):
        folder.check(False, True, [("training data", folder.model_dir / "a.txt")])
    folder.check(False, True, [("training data", folder.path / "a.txt")])


def test_an_output_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dead link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for path in tmp_path.iterdir():
        with pytest.raises(LigerError, match="is not a folder"):
            RunDir(path).check(False, False, [])


def test_a_file_of_settings_that_no_run_writes_is_refused(folder, subtests):
    file = folder.path / "run.json"
    assert folder.read_settings() is None
    cases = [("[]", "holds a list"), ("{}", "settings: the key is missing"), ("{", "is not JSON")]
    cases += [("[" * 100_000, "nested too deep")]
    for key in SETTINGS:
        left = {k: v for k, v in SETTINGS.items() if k != key}
        cases.append((json.dumps(left), f"{key}: the key is missing"))
        cases.append((json.dumps({**SETTINGS, key: [1]}), rf"{key}: \[1\] is not what"))
    cases.append((json.dumps({**SETTINGS, "steps": True}), "steps: True is not what"))
    cases.append((json.dumps({**SETTINGS, "format": 1}), "format: 1 is of another version"))
    cases.append((json.dumps({**SETTINGS, "files": {"a": 1}}), "files: {'a': 1} is not what"))
    for text, message in cases:
        with subtests.test(text[:60]):
            file.write_text(text)
            with pytest.raises(CheckpointError, match=rf"run\.json: .*{message}"):
                folder.read_settings()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="a pipe"):
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


def test_a_folder_in_which_no_run_began_is_left_as_it_was(tmp_path):
    def lock(path, *names):
        with RunDir(path).locked():
            for name in names:
                (path / name).touch()

    lock(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old").mkdir()
    lock(tmp_path / "old")
    assert os.listdir(tmp_path / "old") == []
    lock(tmp_path / "old", "mine")
    assert os.listdir(tmp_path / "old") == ["mine"]
    lock(tmp_path / "old", "run.json")
    assert sorted(os.listdir(tmp_path / "old")) == [".lock", "mine", "run.json"]


def test_the_lock_changes_no_file_of_the_user(folder, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    lock = folder.path / ".lock"
    lock.symlink_to(mine)
    with pytest.raises(SaveError, match=r"\.lock: cannot be written"), folder.locked():
        pass
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(LigerError, match="not a regular file"), folder.locked():
        pass
    lock.unlink()
    lock.write_text("mine")
    with folder.locked():
        pass
    assert mine.read_text() == "mine" and lock.read_text() == "mine"


def test_a_lock_file_that_was_replaced_locks_nothing(folder, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def replaced(lock, flags):
        (folder.path / ".lock").unlink()
        (folder.path / ".lock").touch()

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(LigerError, match="another process"), folder.locked():
        pass


def test_the_curve_is_a_picture(folder):
    pytest.importorskip("matplotlib")
    metrics = [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": 2.0},
        {"step": 1, "eval_loss": 1.0},
    ]
    assert plot_losses(metrics, folder.loss_plot)
    assert folder.loss_plot.read_bytes().startswith(b"\x89PNG")


def test_a_file_in_the_place_of_the_export_is_named(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (run.path / "run.json").write_text("{}")
    run.model_dir.write_text("mine")
    with pytest.raises(LigerError, match="model: this is not a folder; move it away"):
        run.check(True, False, [])


def test_samples_that_no_run_writes_are_refused(folder):
    assert folder.sampled_steps(3) == set()
    folder.log_samples(2, [{"prompt": "a", "text": "b"}])
    before = folder.samples_file.read_text()
    for line in ('{"step": "two"}', "{", "[1]", "\0"):
        folder.samples_file.write_text(f"{before}{line}\n")
        with pytest.raises(CheckpointError, match=r"samples\.jsonl:2: .*; restore or remove the"):
            folder.sampled_steps(3)


def test_without_matplotlib_there_is_no_curve(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot_losses([{"step": 1, "loss": 2.0}], folder.loss_plot)
    assert not folder.loss_plot.exists()
