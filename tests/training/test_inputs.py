"""A resumed run finds the model and the data that it was started with, or says what changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import AutoLiger
from ligermodels.converters.hub import checkpoint_step
from ligermodels.errors import CheckpointError, LigerError
from ligermodels.training.finetune import resumed_settings
from ligermodels.training.model import load_checkpoint
from tests.training.tiny_run import everything, make_checkpoint, make_text, run, same


@pytest.mark.parametrize("change", ["config.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_replaced_model_is_refused_on_resume(text, tmp_path, change, begun):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    if not begun:
        shutil.rmtree(first.output_dir / "checkpoints")
    if change.endswith("safetensors"):
        model = AutoLiger.from_hf(base)
        with torch.no_grad():
            model.norm.weight[0] += 1
        model.save_hf(base)
    else:
        found = json.loads((base / change).read_text())
        found |= {"rms_norm_eps": 0.1, "chat_template": "none"}
        (base / change).write_text(json.dumps(found))
    before = everything(first.output_dir)
    with pytest.raises(LigerError, match=f"not what the run .* with: {change} changed"):
        run(base, text, tmp_path / "run", max_steps=2, resume=True)
    assert everything(first.output_dir) == before


@pytest.mark.parametrize("change", ["base", "options", "data"])
def test_a_checkpoint_of_another_run_is_refused(text, tmp_path, change):
    """Also where its tensors have the shapes of this run's."""
    base, data = make_checkpoint(tmp_path / "base"), make_text(tmp_path / "text.txt")
    run(base, data, tmp_path / "run", max_steps=2)
    changes = {}
    if change == "base":
        make_checkpoint(base, rms_norm_eps=0.1)
    elif change == "options":
        changes = {"learning_rate": 1e-3}
    else:
        make_text(data, seed=1)
    other = run(base, data, tmp_path / "other", max_steps=2, **changes)
    place = "checkpoints/step-00000002"
    shutil.rmtree(other.output_dir / place)
    shutil.copytree(tmp_path / "run" / place, other.output_dir / place)
    with pytest.raises(CheckpointError, match=f"{place}: this is a checkpoint of another run"):
        run(base, data, tmp_path / "other", max_steps=2, resume=True, **changes)


def test_a_model_that_has_moved_is_the_same_model(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    base.rename(tmp_path / "moved")
    again = run(tmp_path / "moved", text, tmp_path / "run", max_steps=2, resume=True)
    assert again.metrics == first.metrics
    assert resumed_settings(tmp_path / "run")["model"] == str(tmp_path / "moved")


def test_the_names_of_a_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    names = ("checkpoints/step-00000500", "checkpoints/step-00000500", "checkpoint-500")
    assert [checkpoint_step(tmp_path / name) for name in names] == [None] * 3
    (tmp_path / "run.json").write_text("{}")
    assert [checkpoint_step(tmp_path / name) for name in names] == [(tmp_path, 500)] * 3
    assert checkpoint_step(tmp_path / "model") is None


@pytest.mark.parametrize("changes", [{}, {"lora_r": 4}, {"freeze": ["embed_tokens"]}])
def test_the_last_checkpoint_is_the_export(checkpoint, text, tmp_path, changes):
    done = run(checkpoint, text, tmp_path / "run", max_steps=2, save_steps=1, **changes)
    found = load_checkpoint(done.output_dir, 2).state_dict()
    assert same(found, done.model.state_dict())
    before = load_checkpoint(done.output_dir, 1).state_dict()
    assert not same(before, found)


def test_what_is_not_there_is_named(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    run(base, text, tmp_path / "run", max_steps=1, save_steps=0)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 1; it has none"):
        load_checkpoint(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="the folder holds no run"):
        load_checkpoint(tmp_path, 1)
    run(base, text, tmp_path / "run", max_steps=1, overwrite_output_dir=True)
    (base / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"started with: tokenizer_config\.json changed"):
        load_checkpoint(tmp_path / "run", 1)


def test_only_files_that_are_read_count(text, tmp_path):
    """A file for another tool does not; one that is read is said to be new or missing."""
    base = make_checkpoint(tmp_path / "base")
    run(base, text, tmp_path / "run", max_steps=1, save_steps=1)
    shutil.copy(base / "model.safetensors", base / "consolidated.safetensors")
    load_checkpoint(tmp_path / "run", 1)
    (base / "tokenizer_config.json").unlink()
    (base / "merges.txt").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is missing, merges.txt is n"):
        load_checkpoint(tmp_path / "run", 1)


FEW_BITS = [{"lora_r": 4, "load_in": bits} for bits in ("4bit", "8bit")]


@pytest.mark.parametrize("changes", [{"lora_r": 4}, {"freeze": ["embed_tokens"]}, *FEW_BITS])
def test_other_weights_than_those_of_the_start_are_refused(text, tmp_path, changes):
    base = make_checkpoint(tmp_path / "base")
    run(base, text, tmp_path / "run", max_steps=1, save_steps=1, **changes)
    load_checkpoint(tmp_path / "run", 1)
    replace_weights(base)
    with pytest.raises(CheckpointError, match=r"started with: model\.safetensors changed"):
        load_checkpoint(tmp_path / "run", 1)


def replace_weights(folder):
    file = folder / "model.safetensors"
    save_file({name: x + 1 for name, x in load_file(file).items()}, file)
