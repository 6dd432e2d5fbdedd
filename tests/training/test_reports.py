"""What a run tells while it trains. The loggers: tests/integrations/test_loggers.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.training.reports import logged, logger_openers, profiled
from ligermodels.training.run_dir import RunDir
from tests.training.tiny_run import run


class Remembers:
    def __init__(self, folder: Path, settings: dict[str, Any], start: int) -> None:
        self.given = folder, settings, start
        self.entries: list[Any] = []
        self.closed = False
        opened.append(self)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.entries.append((step, values))

    def close(self) -> None:
        self.closed = True


opened: list[Remembers] = []


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize("steps", [7, 4, 1])
def test_a_profile_has_three_steps_or_all(tmp_path: Path, steps: int) -> None:
    with profiled(tmp_path / "profile", steps) as after_step:
        for _ in range(steps):
            torch.ones(8, 8) @ torch.ones(8, 8)
            after_step()
    with gzip.open(tmp_path / "profile" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(each["name"] == "aten::mm" for each in events) == min(3, steps)
    assert "aten::mm" in (tmp_path / "profile" / "table.txt").read_text()


def test_a_run_is_profiled(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    done = run(checkpoint, text, tmp_path / "run", max_steps=6, profile=True)
    assert (done.output_dir / "profile" / "trace.json.gz").is_file()
    with profiled(tmp_path / "none", 0) as after_step:
        after_step()
    run(checkpoint, text, tmp_path / "run", max_steps=1, overwrite_output_dir=True)
    assert not (done.output_dir / "profile").exists()


def test_samples_that_cannot_be_made_are_refused_before_a_run_begins(
    checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="sample_prompts: a prompt is empty"):
        run(checkpoint, text, tmp_path / "run", sample_prompts=[""])
    assert not (tmp_path / "run").exists()


def test_loggers_get_each_line_within_the_context(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with logged(run_dir, [Remembers, Remembers], {"a": 1}, 3):
        run_dir.log({"step": 4, "loss": 2.0})
    run_dir.log({"step": 5, "loss": 1.0})
    for logger in opened:
        assert logger.given == (tmp_path, {"a": 1}, 3) and logger.closed
        assert logger.entries == [(4, {"loss": 2.0})]
    assert len(opened) == 2 and logger_openers([]) == []
