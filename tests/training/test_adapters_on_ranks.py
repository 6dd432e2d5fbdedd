"""Runs with adapters in two processes, each with the whole frozen model, make the steps of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ligermodels.training.finetune import finetune
from tests.parallel.ranks import Case, check, run_ranks
from tests.training.test_processes import back_to, losses, options, weights
from tests.training.tiny_run import make_checkpoint, make_text

LORA = {"lora": "r=2", "load_in": "4bit", "learning_rate": 1e-2}


def test_two_processes_make_the_steps_of_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    make_checkpoint(tmp_path / "base")
    make_text(tmp_path / "text.txt")
    alone = options(tmp_path, "alone", gradient_accumulation_steps=2, **LORA)
    finetune(alone, progress=False)
    check(run_ranks(__name__, 2, tmp_path), subtests)
    expected = weights(tmp_path / "alone")
    back_to(tmp_path / "again", 2)
    finetune(options(tmp_path, "again", resume=True, **LORA), progress=False)
    for name in ("two", "again"):
        with subtests.test(name):
            assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
            for key, value in weights(tmp_path / name).items():
                torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def cases(ranks: int) -> dict[str, Case]:
    return {"a run, and again from its middle": run_twice}


def run_twice(number: int, folder: Path) -> dict[str, float]:
    """Resuming on as many ranks gives the same files, bit for bit."""
    root = folder.parent
    finetune(options(root, "two", **LORA), progress=False)
    if number == 0:
        shutil.copytree(root / "two", root / "again")
        back_to(root / "again", 2)
    dist.barrier()
    finetune(options(root, "again", resume=True, **LORA), progress=False)
    dist.barrier()
    files = [(root / run / "model/model.safetensors").read_bytes() for run in ("two", "again")]
    return {"files": float(files[0] != files[1])}
