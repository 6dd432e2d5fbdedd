"""Reference log-probabilities in a file: computed once, found again, and never a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ligermodels.errors import CheckpointError, SaveError
from ligermodels.training.preferences import reference_path, stored_log_probs


def test_computed_once(tmp_path: Path) -> None:
    path = reference_path(tmp_path / "new", "data", "model")
    values = torch.randn(5)
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return values

    for _ in range(2):
        assert stored_log_probs(path, 5, compute).equal(values)
    assert calls == [1] and [*path.parent.iterdir()] == [path]


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = reference_path(tmp_path, "data")
    stored_log_probs(path, 3, lambda: torch.ones(3))

    def never() -> torch.Tensor:
        raise AssertionError

    other = reference_path(tmp_path, "other")
    stored_log_probs(other, 4, lambda: torch.ones(4))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    for wrong in (content, content[:-3], other.read_bytes()):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match="remove the file, and it is computed again"):
            stored_log_probs(path, 3, never)
    (tmp_path / "file").touch()
    with pytest.raises(SaveError):
        stored_log_probs(tmp_path / "file" / "x", 1, lambda: torch.ones(1))
