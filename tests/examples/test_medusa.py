"""The Medusa example: what the heads learn from, and a short run that generates exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import medusa as example
from tests.training.tiny_run import make_checkpoint


def test_there_are_enough_sentences() -> None:
    for name, count in (("heldout", 16), ("train", 1024)):
        found = example.beginnings(example.DATA / f"persuasion-{name}.txt", count)
        assert len(found) == count and all(len(each.split()) == 8 for each in found)


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model soon repeats a token, so its heads learn to guess some."""
    checkpoint = make_checkpoint(tmp_path / "model")
    rate = example.main(
        str(checkpoint),
        tmp_path / "out",
        prompts=12,
        held_out=2,
        new=24,
        batch_size=4,
        max_steps=12,
        seq_len=128,
        learning_rate=1e-2,
    )
    out = capsys.readouterr().out
    assert rate > 1 and "100.0% of them are those of greedy generation" in out
    assert (tmp_path / "out" / "run" / "model" / "medusa_lm_head.safetensors").exists()
