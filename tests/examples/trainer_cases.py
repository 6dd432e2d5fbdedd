"""The examples of trainers in two gloo processes, beside one process and transformers' model."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DistributedSampler

from examples.trainers.rows import Rows
from ligermodels.models.auto import AutoLiger
from tests.families import DECODERS
from tests.integrations.tiny import theirs
from tests.models import hf_models, zoo
from tests.parallel.ranks import Case
from tests.rounding import steady_adamw

INSTALL = 'pip install -c constraints.txt -e ".[tools]"'
RANKS, STEPS, BATCH, RATE = 2, 3, 4, 1e-3
TOOLS = {"accelerate": "accelerate", "Lightning": "lightning", "DeepSpeed": "deepspeed"}
FEATURES = ("accelerate, DDP", "accelerate, FSDP2", "Lightning, FSDP2")
FEATURES += tuple(f"DeepSpeed, ZeRO-{stage}" for stage in range(4))
# A feature, a family, and whether its head is tied.
FAMILIES = [name for name, it in DECODERS.items() if not (it.experts or it.composed or it.mixers)]
CASES = [(feature, "llama", tied) for feature in FEATURES for tied in (False, True)]
CASES += [
    (feature, family, "gemma" in family)
    for feature in ("accelerate, FSDP2", "Lightning, FSDP2", "DeepSpeed, ZeRO-3")
    for family in FAMILIES
    if family != "llama"
]


def make_rows() -> Rows:
    """Rows with different numbers of targets, so that a mean of means is wrong."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 131, (STEPS * BATCH, 10), generator=generator)
    labels = ids.clone()
    for row, first in enumerate(torch.randint(0, 9, (len(ids),), generator=generator)):
        labels[row, :first] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]


def checkpoint(folder: Path, tied: bool, family: str = "llama") -> Path:
    """Save a model that transformers has made."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        feature = zoo.Feature(config={"tie_word_embeddings": tied})
        hf_models.build(family, feature).save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def in_one_process(model: nn.Module, shuffled: bool = False) -> list[float]:
    """Train in a plain loop, and return the losses.

    Args: shuffled, whether the rows have the order that Lightning gives them in two processes.
    """
    rows = make_rows()
    if shuffled:
        samplers = [DistributedSampler(rows, RANKS, rank, shuffle=True) for rank in range(RANKS)]
        rows = [rows[i] for pair in zip(*samplers) for i in pair]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        ids, labels = (torch.stack([row[name] for row in part]) for name in part[0])
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses


def difference(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) == STEPS
    # Unlike Python's max, torch's does not lose a NaN.
    a, b = torch.tensor([found, expected], dtype=torch.float64)
    return (a / b - 1).abs().max().item()


def shard_layers(model: Any) -> None:
    """Shard a model of transformers, as its users do."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def with_accelerate(model: Any, native: bool, fsdp: bool) -> list[float]:
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from examples.trainers import accelerate_loop

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    plugin = None
    if fsdp:
        plugin = accelerate_loop.sharded(model if native else model.model)
        # accelerate leaves the plugin out on CPUs
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    options = {"batch_size": 1, "accumulation": 2, "learning_rate": RATE}
    losses = accelerate_loop.train(model, make_rows(), fsdp=plugin, **options)
    assert isinstance(model, FSDPModule) == fsdp
    return losses


def with_lightning(model: Any, native: bool) -> list[float]:
    from examples.trainers import lightning_module
    from ligermodels import shard

    sharding = shard if native else shard_layers
    module = lightning_module.NextToken(model, RATE, sharding)
    strategy = lightning_module.fsdp2(RANKS)
    return lightning_module.train(module, make_rows(), strategy=strategy, devices=RANKS, **QUIET)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def with_deepspeed(model: Any, native: bool, stage: int) -> list[float]:
    from examples.trainers import deepspeed_zero

    options = {"stage": stage, "learning_rate": RATE, "max_grad_norm": 0.0}
    return deepspeed_zero.train(model, make_rows(), **options)


@steady_adamw()
def resumed(rank: int, place: Path) -> dict[str, float]:
    """Train with ZeRO-3, go on in another engine from its checkpoint, and evaluate there."""
    from examples.trainers import deepspeed_zero

    folder, rows = checkpoint(place / "checkpoint", tied=True), make_rows()
    options = {"learning_rate": RATE, "max_grad_norm": 0.0, "checkpoints": place / "state"}
    losses = deepspeed_zero.train(AutoLiger.from_hf(folder), rows[: 2 * BATCH], **options)
    model = AutoLiger.from_hf(folder)
    losses += deepspeed_zero.train(model, rows, **options)
    whole = AutoLiger.from_hf(folder)
    expected = in_one_process(whole)
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():  # DeepSpeed's hooks gather the parameters
        found, wanted = (each.eval()(ids, labels=ids).loss.item() for each in (model, whole))
    deepspeed_zero.save(model, place / "saved")
    dist.barrier()
    saved = AutoLiger.from_hf(place / "saved").state_dict()
    errors = [(saved[n] - x).norm() / x.norm() for n, x in whole.state_dict().items()]
    return {
        "losses": difference(losses, expected),
        "evaluation": abs(found / wanted - 1),
        "weights": max(errors).item(),
    }


@steady_adamw()
def compare(
    tool: Callable[..., list[float]],
    family: str,
    tied: bool,
    save: Callable[..., None],
    rank: int,
    place: Path,
) -> dict[str, float]:
    folder = checkpoint(place / "checkpoint", tied, family)
    model = AutoLiger.from_hf(folder)
    losses = tool(model, native=True)
    save(model, place / "saved")
    whole = AutoLiger.from_hf(folder)
    expected = in_one_process(whole, shuffled=tool is with_lightning)
    dist.barrier()
    saved = AutoLiger.from_hf(place / "saved").state_dict()
    found = {
        "one process": difference(losses, expected),
        "transformers": difference(losses, tool(theirs(folder), native=False)),
    }
    for name, weight in whole.state_dict().items():
        distance = (saved[name] - weight).norm() / weight.norm()
        found["weights"] = max(found.get("weights", 0.0), distance.item())
    return found


def save_hf(model: Any, folder: Path) -> None:
    model.save_hf(folder)


def cases(ranks: int) -> dict[str, Case]:
    rank = dist.get_rank()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",  # the processes have met already
        "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
    }

    made: dict[str, Case] = {}
    for name, family, tied in CASES:
        tool, _, feature = name.partition(", ")
        if find_spec(TOOLS[tool]) is None:
            continue
        train: Any = with_lightning
        save = save_hf
        if tool == "accelerate":
            train = partial(with_accelerate, fsdp=feature == "FSDP2")
        if tool == "DeepSpeed":
            from deepspeed.comm import torch as comm

            from examples.trainers.deepspeed_zero import save

            # DeepSpeed would compile C++ for up to a minute, to reduce in shared memory.
            comm.build_shm_op = lambda: None
            train = partial(with_deepspeed, stage=int(feature[-1]))
        head = "tied" if tied else "untied"
        made[f"{name}, {family}, {head}"] = partial(compare, train, family, tied, save)
    if find_spec("deepspeed") is not None:
        made["DeepSpeed, resumed and evaluated"] = resumed
    return made
