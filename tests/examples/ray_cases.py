"""Ray Train in two workers beside one process, and beside transformers' model in Ray Train.

Ray's processes import this file, so that it imports transformers only where that is needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ligermodels.models.auto import AutoLiger
from tests.rounding import steady_adamw


@steady_adamw()
def each(config: dict[str, Any]) -> list[list[float]]:
    """Train several models one after the other, because Ray takes seconds to start."""
    from examples.trainers import ray_train

    return [ray_train.worker(one) for one in config["each"]]


@steady_adamw()
def errors(families: Iterable[str], place: Path) -> dict[str, dict[str, float]]:
    """Return the errors of each family: of the losses, and of the weights that were saved."""
    import ray
    import torch

    from examples.trainers import ray_train
    from tests import markdown
    from tests.examples.trainer_cases import (
        RANKS,
        RATE,
        checkpoint,
        difference,
        in_one_process,
        make_rows,
        theirs,
    )

    folders = {name: checkpoint(place / name, "gemma" in name, name) for name in families}
    common: dict[str, Any] = {"rows": make_rows(), "learning_rate": RATE}
    runs = []
    for name, folder in folders.items():
        out = str(place / f"{name}-saved")
        runs.append(common | {"load": partial(AutoLiger.from_hf, folder), "out": out})
        runs.append(common | {"load": partial(theirs, folder)})
    variables = {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "PYTHONPATH": str(markdown.ROOT),
    }
    # The paths of Ray's sockets have to be short.
    short = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with short as state, patch.dict("os.environ", variables):
        options = {"num_cpus": RANKS, "object_store_memory": 2**27, "_temp_dir": state}
        ray.init(include_dashboard=False, **options)
        try:
            losses = iter(ray_train.train({"each": runs}, place / "ray", loop=each))
        finally:
            ray.shutdown()
    found = {}
    for name, folder in folders.items():
        whole = AutoLiger.from_hf(folder)
        expected, ours = in_one_process(whole), next(losses)
        saved = AutoLiger.from_hf(place / f"{name}-saved").state_dict()
        distances = [(saved[n] - x).norm() / x.norm() for n, x in whole.state_dict().items()]
        found[name] = {
            "one process": difference(ours, expected),
            "weights": torch.stack(distances).max().item(),  # a NaN, if one is
            "transformers": difference(ours, next(losses)),
        }
    return found
