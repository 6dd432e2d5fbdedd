"""Checkpoints of a run: resuming is bitwise, and a damaged or foreign one is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from unittest.mock import patch

import pytest
import torch

from ligermodels.errors import CheckpointError, LigerError
from ligermodels.training import checkpoints
from ligermodels.training.checkpoints import Checkpoints, first_not_finite


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


def test_ctrl_c_in_a_save_is_no_fault_of_the_disk(folder):
    model, optimizer = make_model()
    save = "torch.distributed.checkpoint.HuggingFaceStorageWriter.write_data"
    with patch(save, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        folder.save(1, model, optimizer)
    assert folder.latest() is None


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def folder(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def test_old_checkpoints_go_and_other_files_stay(folder):
    model, optimizer = make_model()
    assert folder.latest() is None
    take_steps(model, optimizer, range(1))
    for step in (9, 10, 100):
        folder.save(step, model, optimizer)
    (folder.folder / "step-00000050").mkdir()  # a removal that a kill has cut short
    (folder.folder / "step-00000200.part").mkdir()
    for name in ("step-best", "mine.part"):
        (folder.folder / name).touch()
    folder.prune(2)
    names = ["step-00000010", "step-00000100"]
    others = ["mine.part", "step-best"]
    assert sorted(os.listdir(folder.folder)) == sorted(others + names)
    assert folder.latest() == 100
    folder.clear()
    assert sorted(os.listdir(folder.folder)) == others
    for name in others:
        (folder.folder / name).unlink()
    folder.clear()
    assert not folder.folder.exists()


def refuse(folder, model=None, step=1):
    """Assert that a checkpoint is refused and the model unchanged; return the message."""
    model, optimizer = model or make_model()
    before = weights(model)
    with pytest.raises(CheckpointError) as error:
        folder.load(step, model, optimizer)
    assert torch.equal(weights(model), before)
    first = str(error.value).splitlines()[0]
    assert f"step-{step:08}" in first
    assert "; remove the folder " in first and first.endswith(
        " to resume from an earlier checkpoint"
    )
    return first


@pytest.fixture
def saved(folder):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    return folder.save(1, model, optimizer)


def test_every_cut_file_is_found(folder, saved, caplog):
    caplog.set_level("WARNING")
    for file in sorted(saved.iterdir()):
        whole = file.read_bytes()
        for length in (0, 7, len(whole) - 1):
            file.write_bytes(whole[:length])
            refuse(folder)
        file.write_bytes(whole)
    folder.load(1, *make_model())
    assert not caplog.text  # torch would log a traceback


def test_what_all_ranks_find_is_reported_by_one(folder, saved, monkeypatch):
    for file in saved.glob("*.safetensors"):
        file.write_bytes((2).to_bytes(8, "little") + b"{}")  # whole, but without tensors
    monkeypatch.setattr(checkpoints, "rank", lambda: 1)
    with pytest.raises(CheckpointError, match="; remove the folder ") as error:
        folder.load(1, *make_model())
    assert error.value.is_repeated
    (saved / "facts.json").write_text(json.dumps({"run": folder.run_id}))  # it names no files
    assert "it is missing, or no run has written it" in refuse(folder)


def test_a_file_that_is_missing_or_is_a_folder_is_refused(folder, saved):
    (data,) = saved.glob("*.safetensors")
    data.unlink()
    assert f"{data}: it is missing" in refuse(folder)
    data.mkdir()
    refuse(folder)
    data.rmdir()
    shutil.copy(folder.save(2, *make_model()) / data.name, saved / "more.safetensors")
    assert "more.safetensors: it is missing, or no run has written it" in refuse(folder)
    shutil.rmtree(saved)
    assert folder.latest() == 2


def test_another_run_shape_or_name_is_refused(folder, saved):
    assert "of another run" in refuse(Checkpoints(folder.folder, "other"))
    assert "mismatch" in refuse(folder, make_model(width=5))
    model, _ = make_model()
    longer = torch.nn.Sequential(*model, torch.nn.Linear(1, 1))
    assert "Missing key" in refuse(
        folder, (longer, torch.optim.AdamW(longer.parameters(), fused=True))
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["weight", "state"])
def test_a_state_that_is_not_finite_is_not_saved(folder, value, where):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    bias = model[1].bias
    with torch.no_grad():
        (bias if where == "weight" else optimizer.state[bias]["exp_avg_sq"])[0] = value
    with pytest.raises(LigerError, match=r"step 1: .*1\.bias infinite or NaN"):
        folder.save(1, model, optimizer)
    assert not folder.folder.exists()


def test_values_too_large_for_a_dtype_are_found():
    tensors = {"a": torch.tensor([1.0, -65504.0]), "b": torch.tensor([[70000.0]])}
    assert first_not_finite(tensors.items()) is None
    assert first_not_finite(tensors.items(), torch.float16) == "b"
    assert first_not_finite(tensors.items(), torch.bfloat16) is None
    none = ("none", torch.empty(0))
    assert first_not_finite([]) is None and first_not_finite([none]) is None


@pytest.mark.gpu
def test_tensors_of_two_devices_are_looked_at():
    tensors = {"step": torch.tensor(1.0), "a": torch.ones(2, device="cuda")}
    assert first_not_finite(tensors.items()) is None
    assert first_not_finite([*tensors.items(), ("b", torch.tensor(math.nan))]) == "b"


def test_states_of_eight_bits_are_kept(folder):
    """An optimizer may keep whole numbers, as those of torchao do."""
    made = []
    for seed in (0, 1):
        model, optimizer = make_model(seed=seed)
        take_steps(model, optimizer, range(1 + seed))
        for state in optimizer.state.values():
            state["codes"] = (state["exp_avg"] * 1000).to(torch.uint8)
        made.append((model, optimizer))
    folder.save(1, *made[0])
    folder.load(1, *made[1])
    one, two = ([state["codes"] for state in opt.state.values()] for _, opt in made)
    assert one[0].dtype == torch.uint8 and all(map(torch.equal, one, two))
