"""Train a model with experts on two GPUs, and print its losses beside those of one.

torchrun --nproc-per-node 2 -m tests.gpu.expert_ranks DIMENSION [compiled]
torchrun --nproc-per-node 2 -m tests.gpu.expert_ranks adapters FOLDER DEVICE
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ligermodels import LigerLlama, LlamaConfig, clip_grad_norm_, mean_over_ranks, shard
from ligermodels.layers import Experts, Router
from ligermodels.training.finetune import finetune
from tests.training import test_processes as runs

STEPS, SEQ, EXPERTS = 4, 200, 13


class Routed(LigerLlama):
    """Llama with experts, of which the ranks have different numbers."""

    router_losses = 0.1, 0.01

    def make_block(self, layer_index: int) -> nn.Module:
        block = super().make_block(layer_index)
        block.mlp = Experts(Router(256, EXPERTS, 4, normalize=True), 256, 192)
        return block


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Return ids and labels of two rows, of which one has fewer targets."""
    ids = torch.randint(0, 1000, (2, SEQ), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, :150] = -100
    return ids.cuda(), labels.cuda()


def steps(model: Routed, rank: int | None) -> list[list[float]]:
    """Return the loss and the norm of the gradients of each step; of one row for a rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    found = []
    for step in range(STEPS):
        ids, labels = rows(step)
        if rank is None:
            loss = model(ids, labels=labels).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            own = slice(rank, rank + 1)
            targets = (labels[own, 1:] != -100).sum()
            normalizer = mean_over_ranks(model, targets)
            loss = model(ids[own], labels=labels[own], normalizer=normalizer).loss
            loss.backward()
            norm = clip_grad_norm_(model, 1.0)
            dist.all_reduce(loss.detach())
            loss = loss / dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item(), norm.item()])
    return found


def main(dimension: str, how: str = "") -> None:
    """Compare two ranks with one, in float32."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    whole = Routed(config).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=(dimension,))
    sharded = copy.deepcopy(whole)
    for layer in sharded.layers if how == "compiled" else ():
        layer.compile()
    shard(sharded, mesh)
    found = steps(sharded, rank)
    if rank == 0:
        print("RESULT", json.dumps([found, steps(whole, None)]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def adapters(folder: Path, device: str) -> None:
    """Make the runs of two processes, in float32 and in 4 bits; print the losses of the latter."""
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    runs.SIZES |= {"device": device, "precision": "float32"}
    steps = runs.adapted_experts(rank, folder / "case")
    given = {"expert_parallel": 2, "load_in": "4bit", "precision": "bf16", "export": "adapter"}
    config = runs.with_experts(folder, "four bits", 2, **given, **runs.ADAPTED)
    losses = [each["loss"] for each in finetune(config, progress=False).metrics if "loss" in each]
    if rank == 0:
        print("RESULT", json.dumps([steps, losses]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "adapters":
        adapters(Path(sys.argv[2]), sys.argv[3])
    else:
        main(*sys.argv[1:])
