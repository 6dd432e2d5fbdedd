"""Train with the examples on two GPUs, and print the losses beside those of one.

torchrun --nproc-per-node 2 -m tests.gpu.trainer_ranks TOOL FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from ligermodels import AutoLiger, shard
from tests.examples.trainer_cases import QUIET, RANKS, RATE, in_one_process, make_rows


def main(tool: str, folder: Path) -> None:
    model = AutoLiger.from_hf(folder)
    if tool == "accelerate":
        from examples.trainers import accelerate_loop

        options = {"batch_size": 1, "accumulation": 2, "learning_rate": RATE}
        plugin = accelerate_loop.sharded(model)
        losses = accelerate_loop.train(model, make_rows(), fsdp=plugin, **options)
    else:
        from examples.trainers import lightning_module

        module = lightning_module.NextToken(model, RATE, shard)
        strategy = (
            lightning_module.fsdp1(model) if tool == "fsdp1" else lightning_module.fsdp2(RANKS)
        )
        options = QUIET | {"accelerator": "gpu", "devices": RANKS, "strategy": strategy}
        losses = lightning_module.train(module, make_rows(), **options)
    if os.environ["RANK"] == "0":
        whole = AutoLiger.from_hf(folder)
        expected = in_one_process(whole, shuffled=tool != "accelerate")
        print("RESULT", json.dumps([losses, expected]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
