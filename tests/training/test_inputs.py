"""A resumed run finds the model and the data that it was started with, or says what changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from ligermodels import AutoLiger
from ligermodels.errors import LigerError
from ligermodels.training.finetune import resumed_settings
from tests.training.tiny_run import everything, make_checkpoint, run


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


def test_a_model_that_has_moved_is_the_same_model(text, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    first = run(base, text, tmp_path / "run", max_steps=2)
    base.rename(tmp_path / "moved")
    again = run(tmp_path / "moved", text, tmp_path / "run", max_steps=2, resume=True)
    assert again.metrics == first.metrics
    assert resumed_settings(tmp_path / "run")["model"] == str(tmp_path / "moved")
