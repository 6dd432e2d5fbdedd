"""The preference example: its pairs, and a short run whose held-out accuracy rises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import preference as example
from tests.training.tiny_run import make_checkpoint


def test_pairs_differ_in_one_word(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    for name, count in (("heldout", 16), ("train", 256)):  # as many as the example takes
        example.write_pairs(example.DATA / f"persuasion-{name}.txt", file, count)
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) == count
        for record in records:
            assert record["chosen"] != record["rejected"]
            assert record["chosen"].replace(" & ", " and ") == record["rejected"]
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
    out = capsys.readouterr().out
    assert "eval_rewards/margins: 0.0000 -> " in out
    assert "held-out sentences where & is likelier: " in out
