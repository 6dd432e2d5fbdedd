"""Train with DeepSpeed: ZeRO 0 to 3.

torchrun --nproc-per-node 2 -m examples.trainers.deepspeed_zero MODEL TEXT OUT
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from examples.trainers.rows import Rows, mean_over_processes, num_targets, read_rows
from ligermodels import AutoLiger


def train(
    model: Any,
    rows: Rows,
    *,
    stage: int = 3,
    batch_size: int = 2,
    learning_rate: float = 1e-4,
    max_grad_norm: float = 1.0,
    checkpoints: Path | None = None,
) -> list[float]:
    """Train on all rows once, and return the loss of each step.

    Args:
        max_grad_norm: to which gradients are clipped; 0 clips none. It is DeepSpeed's default.
        checkpoints: a folder for the state at the end. If it holds one, training goes on from it.
    """
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if checkpoints is not None and (checkpoints / "latest").exists():
        engine.load_checkpoint(checkpoints)
    losses = []
    loader = DataLoader(rows, batch_size, sampler=DistributedSampler(rows, shuffle=False))
    for batch in islice(loader, engine.global_steps, None):
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        targets = mean_over_processes(num_targets(batch))
        loss = engine(**batch, num_items_in_batch=targets).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_processes(loss))
    if checkpoints is not None:
        engine.save_checkpoint(checkpoints)
    return losses


def save(model: Any, folder: str | Path) -> None:
    """Save a model, whose parameters ZeRO-3 has spread over the processes."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        if dist.get_rank() == 0:
            model.save_hf(folder)


if __name__ == "__main__":
    name, text, out = sys.argv[1:]
    deepspeed.init_distributed()
    model = AutoLiger.from_hf(name)
    print(train(model, read_rows(name, Path(text))))
    save(model, out)
