"""Train with Ray Train, in two workers.

python -m examples.trainers.ray_train MODEL TEXT OUT
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

from examples.trainers.rows import mean_over_processes, num_targets, read_rows
from ligermodels import AutoLiger


def worker(config: dict[str, Any]) -> list[float]:
    """Train on all rows once, and return the loss of each step."""
    native = config["load"]()
    model = prepare_model(native)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.get("learning_rate", 1e-4))
    losses = []
    for batch in prepare_data_loader(DataLoader(config["rows"], config.get("batch_size", 2))):
        targets = mean_over_processes(num_targets(batch))
        loss = model(**batch, num_items_in_batch=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_processes(loss))
    if config.get("out") and ray.train.get_context().get_world_rank() == 0:
        native.save_hf(config["out"])
    return losses


def train(
    config: dict[str, Any], storage: Path, workers: int = 2, loop: Callable[..., Any] = worker
) -> Any:
    """Run the workers, and return what `loop` returns in the first: the loss of each step."""
    gpus = torch.cuda.is_available()
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
        run_config=RunConfig(storage_path=str(storage.resolve())),
    )
    return trainer.fit().return_value


if __name__ == "__main__":
    name, text, out = sys.argv[1:]
    rows = read_rows(name, Path(text))
    config = {
        "load": lambda: AutoLiger.from_hf(name),
        "rows": rows,
        "out": str(Path(out).resolve()),
    }
    print(train(config, Path(out) / "ray"))
