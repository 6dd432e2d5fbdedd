"""A resumed run finds the model and the data that it was started with, or says what changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from ligermodels import AutoLiger
from ligermodels.errors import CheckpointError, LigerError
from ligermodels.training.finetune import resumed_settings
from tests.training.tiny_run import everything, make_checkpoint, make_text, run


@pytest.mark.parametrize("change", ["config.json", "tokenizer_config.json", "weights"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_replaced_model_is_refused_on_resume(text, tmp_path, change, begun):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    if not begun:
        shutil.rmtree(first.output_dir / "checkpoints")
    if change == "weights":
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


def test_a_resumed_run_names_the_file_that_has_changed(text, tmp_path, checkpoint):
    files = [make_text(tmp_path / f"{seed}.txt", seed=seed) for seed in (1, 2)]
    run(checkpoint, files, tmp_path / "run", max_steps=2)
    make_text(files[1], seed=3)
    with pytest.raises(LigerError, match=f"new or missing: {files[1]}\\)"):
        run(checkpoint, files, tmp_path / "run", max_steps=2, resume=True)


def test_a_model_that_has_moved_is_the_same_model(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    base.rename(tmp_path / "moved")
    again = run(tmp_path / "moved", text, tmp_path / "run", max_steps=2, resume=True)
    assert again.metrics == first.metrics
    assert resumed_settings(tmp_path / "run")["model"] == str(tmp_path / "moved")
