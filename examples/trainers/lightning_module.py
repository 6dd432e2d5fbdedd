"""Train with Lightning; several processes shard the model with FSDP2.

torchrun --nproc-per-node 2 -m examples.trainers.lightning_module MODEL TEXT OUT
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.trainers.rows import Rows, mean_over_processes, num_targets, read_rows
from ligermodels import AutoLiger, shard


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
    module: NextToken, rows: Rows, processes: int = 1, batch_size: int = 2, **options: Any
) -> list[float]:
    """Train on all rows once, and return the loss of each step.

    Args: options, of Lightning's Trainer.
    """
    if processes > 1:
        options["strategy"] = ModelParallelStrategy(processes, 1)
    trainer = lightning.Trainer(max_epochs=1, devices=processes, **options)
    trainer.fit(module, DataLoader(rows, batch_size))
    return module.losses


if __name__ == "__main__":
    name, text, out = sys.argv[1:]
    model = AutoLiger.from_hf(name)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    print(train(NextToken(model), read_rows(name, Path(text)), processes))
    model.save_hf(out)
