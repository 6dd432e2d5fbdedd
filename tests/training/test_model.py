"""The model of a run's checkpoint is what the run exported after that step."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from ligermodels.errors import CheckpointError
from ligermodels.training.model import checkpoint_step, load_checkpoint
from tests.training.tiny_run import make_checkpoint, run, same


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
    found = load_checkpoint(done.output_dir, 2)[0].state_dict()
    assert same(found, done.model.state_dict())
    before = load_checkpoint(done.output_dir, 1)[0].state_dict()
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


FEW_BITS = [{"lora_r": 4, "load_in": bits} for bits in ("4bit", "8bit")]


@pytest.mark.parametrize("changes", [{"lora_r": 4}, {"freeze": ["embed_tokens"]}, *FEW_BITS])
def test_other_weights_than_those_of_the_start_are_refused(text, tmp_path, changes):
    base = make_checkpoint(tmp_path / "base")
    run(base, text, tmp_path / "run", max_steps=1, save_steps=1, **changes)
    load_checkpoint(tmp_path / "run", 1)
    replace_weights(base)
    with pytest.raises(CheckpointError, match="started with: weights changed"):
        load_checkpoint(tmp_path / "run", 1)


def replace_weights(folder):
    file = folder / "model.safetensors"
    save_file({name: x + 1 for name, x in load_file(file).items()}, file)
