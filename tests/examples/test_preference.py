"""The preference example: its pairs, and a short run whose held-out accuracy rises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import preference as example
from tests.training.tiny_run import make_checkpoint


def test_pairs_hold_the_same_words(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    example.write_pairs(example.DATA / "persuasion-heldout.txt", file, 20)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 20
    for record in records:
        chosen, rejected = (record[key].rstrip(".").split() for key in ("chosen", "rejected"))
        assert chosen != rejected and sorted(chosen) == sorted(rejected)
        assert len(record["prompt"].split()) == 8


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model")
    result = example.main(
        str(tmp_path / "model"),
        tmp_path / "out",
        pairs=16,
        held_out=8,
        batch_size=4,
        max_steps=4,
        eval_steps=4,
        learning_rate=3e-3,
        seq_len=256,
        beta=0.5,
    )
    assert result.eval_loss_after < result.eval_loss_before
    assert result.eval_after["eval_rewards/accuracies"] > 0.5
    assert "eval_rewards/margins: 0.0000 -> " in capsys.readouterr().out
