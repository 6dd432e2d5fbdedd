"""What a run tells while it trains. The loggers: tests/integrations/test_loggers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ligermodels.training.reports import logged, logger_openers
from ligermodels.training.run_dir import RunDir


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


def test_loggers_get_each_line_within_the_context(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with logged(run_dir, [Remembers, Remembers], {"a": 1}, 3):
        run_dir.log({"step": 4, "loss": 2.0})
    run_dir.log({"step": 5, "loss": 1.0})
    for logger in opened:
        assert logger.given == (tmp_path, {"a": 1}, 3) and logger.closed
        assert logger.entries == [(4, {"loss": 2.0})]
    assert len(opened) == 2 and logger_openers(None) == []
