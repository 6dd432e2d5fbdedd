"""Train with accelerate, in a loop of your own; with FSDP2 if there are several processes.

accelerate launch -m examples.trainers.accelerate_loop MODEL TEXT OUT
torchrun --nproc-per-node 2 -m examples.trainers.accelerate_loop MODEL TEXT OUT
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader

from examples.trainers.rows import Rows, mean_over_processes, num_targets, read_rows
from ligermodels import AutoLiger


def sharded(model: torch.nn.Module) -> FullyShardedDataParallelPlugin:
    """Return the plugin that shards each layer of a native model, and the rest as a whole."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in model.layers}),
    )


def train(
    model: Any,
    rows: Rows,
    *,
    batch_size: int = 2,
    accumulation: int = 2,
    learning_rate: float = 1e-4,
    fsdp: FullyShardedDataParallelPlugin | None = None,
) -> list[float]:
    """Train on all rows once, and return the loss of each step."""
    every = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=every, fsdp_plugin=fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size))
    batches, losses = iter(loader), []
    for _ in range(len(loader) // accumulation):
        step = list(islice(batches, accumulation))
        targets = mean_over_processes(sum(map(num_targets, step)))
        total = torch.zeros((), device=accelerator.device)
        for batch in step:
            with accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=targets).loss
                accelerator.backward(accumulation * loss)  # accelerate divides by it
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        losses.append(mean_over_processes(total))
    return losses


if __name__ == "__main__":
    name, text, out = sys.argv[1:]
    model = AutoLiger.from_hf(name)
    plugin = sharded(model) if Accelerator().num_processes > 1 else None
    print(train(model, read_rows(name, Path(text)), fsdp=plugin))
    model.save_hf(out)
