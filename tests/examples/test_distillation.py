"""The distillation example: its student, and a short run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import distillation as example
from ligermodels import AutoLiger
from tests.training.tiny_run import make_checkpoint, make_text


def test_the_student_has_every_second_layer(tmp_path: Path) -> None:
    teacher = make_checkpoint(tmp_path / "model", num_hidden_layers=3)
    example.make_student(str(teacher), tmp_path / "student")
    one, other = AutoLiger.from_hf(teacher), AutoLiger.from_hf(tmp_path / "student")
    assert len(other.layers) == 2 and (tmp_path / "student" / "tokenizer.json").exists()
    for mine, theirs in ((0, 0), (1, 2)):
        for name, value in other.layers[mine].state_dict().items():
            assert torch.equal(value, one.layers[theirs].state_dict()[name])
    assert torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)


def test_a_short_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = make_checkpoint(tmp_path / "model")
    monkeypatch.setattr(example, "DATA", tmp_path)  # the novel is long
    for name in ("train", "heldout"):
        make_text(tmp_path / f"persuasion-{name}.txt")
    losses = example.main(
        str(teacher),
        tmp_path / "out",
        batch_size=2,
        max_steps=3,
        max_eval_rows=2,
        seq_len=64,
        learning_rate=3e-3,
    )
    assert losses["text alone"] < losses["before"]
    assert losses["with the teacher"] != losses["before"]
    assert "held-out loss of the next token, with the teacher: " in capsys.readouterr().out
