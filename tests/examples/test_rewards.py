"""The example with rewards: its reward function, and a short run whose reward rises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import rewards as example
from tests.training.tiny_run import make_checkpoint


def test_the_reward() -> None:
    texts = ["A cat is a small animal.", "", "1 2 3", [{"role": "assistant", "content": "Yes!"}]]
    assert example.short_words(texts) == [4 / 6, 0.0, 0.0, 1.0]


def test_prompts(tmp_path: Path) -> None:
    for chat in (True, False):
        example.write_prompts(tmp_path / "p.jsonl", ["tea", "a cat"], chat)
        records = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
        assert len(records) == 8
        last = records[-1]["prompt"]
        assert (last[0]["content"] if chat else last) == "How old is a cat?"


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model")
    result = example.main(
        str(tmp_path / "model"),
        tmp_path / "out",
        chat=False,
        held_out=1,
        batch_size=16,
        gradient_accumulation_steps=1,
        max_completion_length=24,
        seq_len=96,
        max_steps=6,
        eval_steps=6,
        learning_rate=1e-2,
    )
    before, after = result.eval_before["eval_reward"], result.eval_after["eval_reward"]
    assert after > before
    assert "share of short words in held-out answers: " in capsys.readouterr().out
