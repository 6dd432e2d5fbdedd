"""The examples that train: their data, and a short run of each."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import command, distillation, medusa, preference, rewards, smollm2
from ligermodels import AutoLiger
from tests import markdown
from tests.training.tiny_run import make_checkpoint, make_text


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(make_checkpoint(tmp_path / "model", num_hidden_layers=3))


def test_the_demo(
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = markdown.small_checkpoint(smollm2, tmp_path / "tiny")
    options = ["--model", str(model), "--max-steps", "1", "--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["demo.py", *options])
    monkeypatch.syspath_prepend(markdown.ROOT / "examples")  # as for a script
    demo = importlib.import_module("demo")
    monkeypatch.setattr(demo, "SEQ_LEN", 64)
    demo.main()
    printed = capsys.readouterr().out
    before, after = (float(x) for x in re.findall(r"held-out perplexity ([\d.]+)", printed))
    assert after < before
    assert float(re.search(r"float32 differ by at most ([\d.e+-]+) ", printed)[1]) < 1e-4
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()


def test_distillation(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "DATA", tmp_path)  # the novel is long
    for name in ("train", "heldout"):
        make_text(tmp_path / f"persuasion-{name}.txt")
    options = {"batch_size": 2, "max_steps": 3, "max_eval_rows": 2, "seq_len": 64}
    losses = distillation.main(checkpoint, tmp_path / "out", learning_rate=3e-3, **options)
    assert losses["text alone"] < losses["before"] != losses["with the teacher"]
    distillation.make_student(checkpoint, tmp_path / "student")
    one, other = AutoLiger.from_hf(checkpoint), AutoLiger.from_hf(tmp_path / "student")
    for mine, theirs in zip(other.layers, (one.layers[0], one.layers[2]), strict=True):
        expected = theirs.state_dict()
        assert all(torch.equal(x, expected[name]) for name, x in mine.state_dict().items())


def test_medusa(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model soon repeats a token, so its heads learn to guess some."""
    assert len(medusa.beginnings(command.TRAIN, 1024)) == 1024
    options = {"prompts": 12, "held_out": 2, "new": 24, "batch_size": 4, "max_steps": 12}
    out = tmp_path / "out"
    assert medusa.main(checkpoint, out, seq_len=128, learning_rate=1e-2, **options) > 1
    assert "100.0% of them are those of greedy generation" in capsys.readouterr().out
    assert (out / "run" / "model" / "medusa_lm_head.safetensors").exists()


def test_preference(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.jsonl"
    preference.write_pairs(command.TRAIN, file, 256)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 256
    for record in records:
        assert record["chosen"] != record["rejected"]
        assert record["chosen"].replace(" & ", " and ") == record["rejected"]
    options: dict[str, Any] = {"pairs": 16, "held_out": 8, "batch_size": 4, "max_steps": 4}
    options |= {"eval_steps": 4, "learning_rate": 3e-3, "seq_len": 256, "beta": 0.5}
    result = preference.main(checkpoint, tmp_path / "out", **options)
    assert result.eval_after["eval_loss"] < result.eval_before["eval_loss"]
    assert "held-out sentences where & is likelier: " in capsys.readouterr().out
    assert (tmp_path / "out" / "picture.png").is_file()


def test_rewards(checkpoint: str, tmp_path: Path) -> None:
    texts = ["A cat is a small animal.", "", "1 2 3", [{"role": "assistant", "content": "Yes!"}]]
    assert rewards.short_words(texts) == [4 / 6, 0.0, 0.0, 1.0]
    options: dict[str, Any] = {"held_out": 1, "batch_size": 16, "gradient_accumulation_steps": 1}
    options |= {"max_completion_length": 24, "seq_len": 96, "max_steps": 6, "eval_steps": 6}
    result = rewards.main(checkpoint, tmp_path / "out", chat=False, learning_rate=1e-2, **options)
    assert result.eval_after["eval_reward"] > result.eval_before["eval_reward"]


def test_the_checkpoint_from_the_package(tmp_path: Path) -> None:
    """Rows of a head are pairs there, and halves in HF's checkpoints."""
    heads, half, columns = 3, 4, 5
    original = torch.arange(heads * 2 * half * columns).view(heads * 2 * half, columns).float()
    paired = original.view(heads, 2, half, columns).transpose(1, 2).reshape(original.shape)
    assert torch.equal(smollm2.halves_apart(paired, heads), original)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else"):
        smollm2.obtain(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
