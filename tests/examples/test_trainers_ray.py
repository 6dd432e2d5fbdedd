"""Ray Train in two workers equals one process, and transformers' model in Ray Train."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.examples import ray_cases
from tests.examples.trainer_cases import INSTALL


@pytest.mark.long
@pytest.mark.parametrize("with_theirs", [False, True])
def test_ray_train(with_theirs: bool, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=INSTALL)
    # Ray leaves threads and handlers of signals in its process, which later tests would meet.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with ProcessPoolExecutor(1, context) as pool:
        run = pool.submit(ray_cases.errors, ["llama"], tmp_path, with_theirs)
    (found,) = run.result().values()
    assert len(found) == 2 + with_theirs and max(found.values()) < 1e-5
