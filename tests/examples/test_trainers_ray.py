"""Ray Train in two workers equals one process, and transformers' model in Ray Train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import ray_cases
from tests.examples.trainer_cases import INSTALL


@pytest.mark.parametrize("with_theirs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ray_train(with_theirs: bool, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=INSTALL)
    (found,) = ray_cases.errors(["llama"], tmp_path, with_theirs).values()
    assert len(found) == 2 + with_theirs and max(found.values()) < 1e-5
