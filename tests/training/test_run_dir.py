"""The run folder: what is refused, what survives, what a checkpoint holds."""

from __future__ import annotations

import os
import stat

import pytest
import torch

from ligermodels.errors import CheckpointError, LigerError, SaveError
from ligermodels.training.run_dir import RunDir, atomic_write, load_checkpoint, plot_losses


def make_model(width=3, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def take_steps(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def folder(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def test_going_on_from_a_checkpoint_is_bitwise_the_same(folder):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(3))
    file = folder.save_checkpoint(3, model, optimizer, keep=2)
    take_steps(model, optimizer, range(3, 7))
    other, fresh = make_model(seed=1)
    assert load_checkpoint(file, other, fresh) == 3
    take_steps(other, fresh, range(3, 7))
    assert torch.equal(weights(model), weights(other))


def test_old_checkpoints_go_and_the_latest_is_found(folder):
    model, optimizer = make_model()
    assert folder.latest_checkpoint() is None
    take_steps(model, optimizer, range(1))
    for step in (9, 10, 100):
        folder.save_checkpoint(step, model, optimizer, keep=2)
    names = sorted(file.name for file in folder.checkpoint_dir.iterdir())
    assert names == ["step-00000010.safetensors", "step-00000100.safetensors"]
    assert folder.latest_checkpoint().name == names[-1]


@pytest.mark.parametrize("damage", ["cut", "shape", "name"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changed(folder, damage):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    file = folder.save_checkpoint(1, model, optimizer, keep=1)
    other, fresh = make_model(width=5 if damage == "shape" else 3)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    if damage == "name":
        other = torch.nn.Sequential(*other, torch.nn.Linear(1, 1))
    before = weights(other)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(file, other, fresh)
    assert str(error.value).startswith(f"{file}: ")
    assert torch.equal(weights(other), before)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def full_disk(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(SaveError, match=r"a\.txt: cannot be written: No space left on device"):
        atomic_write(file, full_disk)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_files_have_the_mode_of_the_umask(folder):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    old = os.umask(0o027)
    try:
        file = folder.save_checkpoint(1, model, optimizer, keep=1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


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


def test_another_run_is_refused_unless_told_otherwise(folder, tmp_path):
    folder.check(False, False, [])
    (folder.path / "notes.txt").write_text("mine")
    folder.check(False, False, [])
    folder.write_settings({"settings": {}})
    with pytest.raises(LigerError, match=r"holds another run \(run\.json\)"):
        folder.check(False, False, [])
    folder.check(True, False, [])
    folder.check(False, True, [])
    folder.clear()
    assert os.listdir(folder.path) == ["notes.txt"]


def test_overwriting_what_the_run_reads_is_refused(folder):
    folder.model_dir.mkdir()
    with pytest.raises(LigerError, match="would remove the model"):
        folder.check(False, True, [("model", folder.model_dir)])
    with pytest.raises(LigerError, match="would remove the training data"):
        folder.check(False, True, [("training data", folder.model_dir / "a.txt")])
    folder.check(False, True, [("training data", folder.path / "a.txt")])


def test_what_is_no_run_cannot_be_resumed(folder, tmp_path):
    folder.model_dir.mkdir()
    with pytest.raises(LigerError, match=r"no run\.json"):
        folder.check(True, False, [])
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LigerError, match="is a file"):
        RunDir(file).check(False, False, [])
    for text, message in (("[]", "holds a list"), ("{}", "settings"), ("{", "is not JSON")):
        (folder.path / "run.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"run\.json: .*{message}"):
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


def test_the_curve_is_a_picture(folder):
    pytest.importorskip("matplotlib")
    metrics = [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": 2.0},
        {"step": 1, "eval_loss": 1.0},
    ]
    assert plot_losses(metrics, folder.loss_plot)
    assert folder.loss_plot.read_bytes().startswith(b"\x89PNG")
