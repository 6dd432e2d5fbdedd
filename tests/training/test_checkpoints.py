"""Checkpoints of a run: resuming is bitwise, and a damaged or foreign file is refused."""

from __future__ import annotations

import json
import math
import os
import random
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.errors import CheckpointError, LigerError
from ligermodels.parallel.layout import TensorSlice
from ligermodels.training import sharded_checkpoints
from ligermodels.training.checkpoints import Checkpoints, _copy, _stored, first_not_finite


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
    return Checkpoints(tmp_path / "checkpoints", run="one")


def content(file):
    """Return the tensors and the facts of a checkpoint."""
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        return tensors, json.loads(opened.metadata()["ligermodels"])


def test_going_on_from_a_checkpoint_is_bitwise_the_same(folder):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(3))
    folder.save(3, model, optimizer)
    take_steps(model, optimizer, range(3, 7))
    other, fresh = make_model(seed=1)
    folder.load(3, other, fresh)
    take_steps(other, fresh, range(3, 7))
    assert torch.equal(weights(model), weights(other))


def test_the_same_state_gives_the_same_bytes(folder, tmp_path):
    files = []
    for place in (folder, Checkpoints(tmp_path / "other", run="one")):
        model, optimizer = make_model()
        take_steps(model, optimizer, range(2))
        files.append(place.save(2, model, optimizer).read_bytes())
    assert files[0] == files[1]


def test_old_checkpoints_go_and_other_files_stay(folder):
    model, optimizer = make_model()
    assert folder.latest() is None
    take_steps(model, optimizer, range(1))
    for step in (9, 10, 100):
        folder.save(step, model, optimizer)
    for name in ("step-best.safetensors", "mine.part", "step-00000200.safetensors.part"):
        (folder.folder / name).touch()
    folder.prune(2)
    names = ["step-00000010.safetensors", "step-00000100.safetensors"]
    others = ["mine.part", "step-best.safetensors"]
    assert sorted(os.listdir(folder.folder)) == sorted(others + names)
    assert folder.latest() == 100
    folder.clear()
    assert sorted(os.listdir(folder.folder)) == others
    for name in others:
        (folder.folder / name).unlink()
    folder.clear()
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
    assert f"step-{step:08}.safetensors" in first
    assert first.endswith("; remove the file to resume from an earlier checkpoint")
    return first


def test_a_checkpoint_of_several_files_is_removed_as_one(folder):
    """Without the folder that the message names, the run resumes from the checkpoint before."""
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    folder.save(1, model, optimizer)
    for step in (2, 3):
        path, facts = folder.folder / f"step-{step:08}", {"step": step, "run": "one"}
        sharded_checkpoints.write(path, _stored(model, optimizer), facts)
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = f"remove the folder {path} to resume from an earlier checkpoint"
    with pytest.raises(CheckpointError, match=f"{data}: the content does not match .*; {said}$"):
        folder.load(3, *make_model())
    data.unlink()
    with pytest.raises(CheckpointError, match=f"^{data}: the file is missing; {said}$"):
        folder.load(3, *make_model())
    data.mkdir()
    with pytest.raises(CheckpointError, match=f"^{data}: this is not a regular .*; {said}$"):
        folder.load(3, *make_model())
    shutil.rmtree(path)
    assert folder.latest() == 2


@pytest.fixture
def saved(folder):
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    return folder.save(1, model, optimizer)


def test_every_flipped_bit_is_found(folder, saved):
    whole = saved.read_bytes()
    draw = random.Random(0)
    begin = 8 + int.from_bytes(whole[:8], "little")
    places = [draw.randrange(begin, len(whole)) for _ in range(20)]
    places += [draw.randrange(begin) for _ in range(40)]
    for place in places:
        torn = bytearray(whole)
        torn[place] ^= 1 << draw.randrange(8)
        saved.write_bytes(torn)
        refuse(folder)
    saved.write_bytes(whole)
    folder.load(1, *make_model())


def test_a_file_that_is_cut_is_refused_at_every_length(folder, saved):
    whole = saved.read_bytes()
    for length in (0, 7, 100, len(whole) - 8, len(whole) - 1):
        saved.write_bytes(whole[:length])
        refuse(folder)


def test_another_shape_dtype_or_name_is_refused(folder, saved, subtests):
    with subtests.test("shape"):
        assert "of shape [5]" in refuse(folder, make_model(width=5))
    with subtests.test("name"):
        model, _ = make_model()
        model = torch.nn.Sequential(*model, torch.nn.Linear(1, 1))
        longer = model, torch.optim.AdamW(model.parameters(), fused=True)
        assert "is missing" in refuse(folder, longer)
    tensors, facts = content(saved)
    for name in ("model.0.weight", "optimizer.exp_avg.0.bias", "optimizer.step.1.weight"):
        with subtests.test(name):
            other = {**tensors, name: tensors[name].bfloat16()}
            save_file(other, saved, {"ligermodels": json.dumps(facts)})
            assert "is BF16 of shape" in refuse(folder)


def test_a_wrong_step_is_refused(folder, saved, subtests):
    tensors, facts = content(saved)
    with subtests.test("the header says another step"):
        save_file(tensors, saved, {"ligermodels": json.dumps({**facts, "step": 7})})
        assert "checksum" in refuse(folder)
    with subtests.test("no facts"):
        save_file(tensors, saved)
        assert "checksum" in refuse(folder)
    with subtests.test("the optimizer counts another step"):
        model, optimizer = make_model()
        take_steps(model, optimizer, range(2))
        folder.save(1, model, optimizer)
        assert "the name says step 1" in refuse(folder)
    with subtests.test("the file has the name of another step"):
        take_steps(*make_model(), range(1))
        folder.save(2, model, optimizer).rename(folder.folder / "step-00000009.safetensors")
        assert "the name says step 9, but the file holds step 2" in refuse(folder, step=9)


def test_a_checkpoint_of_another_run_is_refused(folder, saved):
    assert "belongs to a run with" in refuse(Checkpoints(folder.folder, run="another"))


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="the folder cannot be read"):
            Checkpoints(tmp_path / name).latest()


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
    assert first_not_finite([]) is None


def test_a_tensor_without_elements_is_finite():
    named = [("none", torch.empty(0)), ("one", torch.tensor([float("inf")]))]
    assert first_not_finite(named[:1]) is None and first_not_finite(named) == "one"


@pytest.mark.gpu
def test_tensors_of_two_devices_are_looked_at():
    tensors = {"step": torch.tensor(1.0), "a": torch.ones(2, device="cuda")}
    assert first_not_finite(tensors.items()) is None
    assert first_not_finite([*tensors.items(), ("b", torch.tensor(math.nan))]) == "b"


def test_states_of_eight_bits_are_kept(folder):
    """An optimizer may keep whole numbers, as those of torchao do."""
    model, optimizer = make_model()
    take_steps(model, optimizer, range(1))
    for state in optimizer.state.values():
        state["codes"] = (state["exp_avg"] * 1000).to(torch.uint8)
    folder.save(1, model, optimizer)
    tensors, _ = content(folder.files()[1])
    assert tensors["optimizer.codes.0.weight"].dtype == torch.uint8
    file = SafetensorsFile(folder.files()[1])
    (read,) = file.read("optimizer.codes.0.weight")
    assert torch.equal(read, tensors["optimizer.codes.0.weight"])


def test_a_block_of_columns_is_read_from_the_file(tmp_path):
    """A rank of tensor parallelism has columns of some parameters, and rows of others."""
    whole = torch.randn(6, 5)
    save_file({"a": whole}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for rows, columns in ((slice(2, 6), slice(1, 3)), (slice(1, 4), slice(0, 5))):
        values = torch.zeros_like(whole[rows, columns])
        _copy(file, "a", TensorSlice(values, rows.start, columns.start), (6, 5))
        assert torch.equal(values, whole[rows, columns])
