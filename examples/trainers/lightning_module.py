"""Train with Lightning; several processes shard the model.

torchrun --nproc-per-node 2 -m examples.trainers.lightning_module MODEL TEXT OUT
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.trainers.rows import Rows, mean_over_processes, num_targets, read_rows
from ligermodels import AutoLiger, shard


def fsdp2(processes: int) -> ModelParallelStrategy:
    """Return the strategy that lets `NextToken` shard the model: FSDP2."""
    return ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1)


def fsdp1(model: nn.Module) -> FSDPStrategy:
    """Return the strategy that wraps each layer, and then the model: FSDP 1. It needs GPUs."""
    layers = {type(layer) for layer in model.layers}
    return FSDPStrategy(auto_wrap_policy=layers, use_orig_params=True)


class NextToken(lightning.LightningModule):
    """Trains a model to predict the next token.

    Args: model; learning_rate; shard, which spreads the model over several processes.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float = 1e-4, shard: Callable[..., Any] = shard
    ) -> None:
        super().__init__()
        self.model, self.learning_rate, self.shard = model, learning_rate, shard
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.shard(self.model)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        targets = mean_over_processes(num_targets(batch))
        loss = self.model(**batch, num_items_in_batch=targets).loss
        self.losses.append(mean_over_processes(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)


def train(
    module: NextToken, rows: Rows, batch_size: int = 2, strategy: Any = "auto", **options: Any
) -> list[float]:
    """Train on all rows once, and return the loss of each step.

    Args: options, of Lightning's Trainer.
    """
    trainer = lightning.Trainer(max_epochs=1, strategy=strategy, **options)
    trainer.fit(module, DataLoader(rows, batch_size))
    return module.losses


if __name__ == "__main__":
    name, text, out = sys.argv[1:]
    model = AutoLiger.from_hf(name)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    strategy = fsdp2(processes) if processes > 1 else "auto"
    options = {"strategy": strategy, "devices": processes, "default_root_dir": out}
    print(train(NextToken(model), read_rows(name, Path(text)), **options))
    model.save_hf(out)
