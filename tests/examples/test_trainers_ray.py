"""Ray Train in two workers equals one process, and transformers' model in Ray Train."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ligermodels.models.auto import AutoLiger
from tests.examples.trainer_cases import (
    INSTALL,
    RATE,
    checkpoint,
    difference,
    in_one_process,
    make_rows,
    theirs,
)


@pytest.mark.long
def test_ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason=INSTALL)
    from examples.trainers import ray_train

    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    folder = checkpoint(tmp_path / "checkpoint", tied=True)
    expected = in_one_process(AutoLiger.from_hf(folder))
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir="/tmp/ray-of-tests")
    try:
        found = []
        for load in (AutoLiger.from_hf, theirs):
            config = {"load": partial(load, folder), "rows": make_rows(), "learning_rate": RATE}
            if load == AutoLiger.from_hf:
                config["out"] = str(tmp_path / "saved")
            found.append(ray_train.train(config, tmp_path / "ray"))
    finally:
        ray.shutdown()
    assert difference(found[0], expected) < 1e-5
    assert difference(found[0], found[1]) < 1e-5
    saved = in_one_process(AutoLiger.from_hf(tmp_path / "saved"))
    assert saved[0] < expected[0]
