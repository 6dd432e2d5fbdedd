"""Float8 linears whose weights are spread over two processes compute what one process computes."""

from __future__ import annotations

import copy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligermodels import MemoryPlan, float8, shard
from ligermodels.training import finetune as stages
from ligermodels.training.finetune import finetune
from tests.float8.test_float8 import every, model_of, tokens
from tests.parallel.ranks import Case, check, run_ranks
from tests.parallel.steps import differences, gradients
from tests.training.tiny_run import (
    draw_nothing,
    forget,
    make_checkpoint,
    make_text,
    options,
    same,
    tensors,
)


def test_two_processes(tmp_path: Path, subtests: pytest.Subtests) -> None:
    make_checkpoint(tmp_path / "base")
    make_text(tmp_path / "text.txt")
    check(run_ranks(__name__, 2, tmp_path), subtests)


def cases(ranks: int) -> dict[str, Case]:
    stages.plot_losses = draw_nothing  # type: ignore[attr-defined]
    sys.modules[float8.convert.__module__].SMALL = 16  # type: ignore[attr-defined]
    found: dict[str, Case] = {recipe: partial(step, recipe) for recipe in ("rowwise", "delayed")}
    for name, changes in {"sharded": {}, "adapters": {"lora_r": 4}}.items():
        found[f"a run, {name}"] = partial(run_twice, changes)
    return found


def step(recipe: str, rank: int, folder: Path) -> dict[str, float]:
    """The same rows on both ranks give the gradients of one process, also with a plan."""
    alone, ids = model_of(torch.float32), tokens()
    model = copy.deepcopy(alone)
    for each in (alone, model):
        float8.convert(each, recipe, filter=every)
    shard(model, reshard_after_forward=True)
    found = {}
    for number, plan in enumerate((None, MemoryPlan.of(["input", "no_gate_up"]))):
        for each in (alone, model):
            each.zero_grad()
            each.set_memory_plan(plan)
            each(ids, labels=ids).loss.backward()
        found[f"gradients, {number}"] = differences(gradients(model), gradients(alone))
        for each in (alone, model):  # the scales of the next step
            torch.optim.SGD(each.parameters(), lr=0.0).step()
    return found


def run_twice(changes: dict[str, int], rank: int, folder: Path) -> dict[str, float]:
    """A run with delayed scales, whose ranks have the same ones, goes on from its middle."""
    changes = {**changes, "float8": "delayed", "save_steps": 3, "max_steps": 6}
    base, text, killed = folder.parent / "base", folder.parent / "text.txt", folder / "killed"
    whole = finetune(options(base, text, folder / "whole", **changes), progress=False)
    scales = [*float8.scales(whole.model).values()]
    both = [[], []] if rank == 0 else None
    dist.gather_object(scales, both)
    if both is not None and "lora_r" not in changes:  # adapters were merged into another model
        assert len(both[0]) == 8 and all(rows[:, :2].all() for rows in both[0])
        assert all(map(torch.equal, *both))
    if rank == 0:
        shutil.copytree(folder / "whole", killed)
        forget(killed, 6)
        shutil.rmtree(killed / "model")
    dist.barrier()
    finetune(options(base, text, killed, **changes, resume=True), progress=False)
    return {"weights": 1.0 - same(tensors(folder / "whole/model"), tensors(killed / "model"))}
