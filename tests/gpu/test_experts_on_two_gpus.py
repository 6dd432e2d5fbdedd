"""Experts on two GPUs, spread by FSDP2 or by expert parallelism, equal those of one process.

LIGERMODELS_TEST_DEVICE=cpu runs the adapters in two processes on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.training.finetune import finetune
from tests.training import test_processes as runs
from tests.training.tiny_run import make_checkpoint, make_text

ROOT = Path(__file__).parent.parent.parent
DEVICE = os.environ.get("LIGERMODELS_TEST_DEVICE", "cuda")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def on_two_ranks(*words: str) -> list:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.gpu.expert_ranks", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("layout", ["dp_shard", "ep", "ep compiled"])
def test_losses_and_norms(layout: str) -> None:
    found, expected = on_two_ranks(*layout.split())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_runs_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with --expert-parallel 2 and its resumed half; in 4 bits the losses are similar."""
    monkeypatch.setitem(runs.SIZES, "device", DEVICE)
    monkeypatch.setitem(runs.SIZES, "precision", "float32")
    sizes = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
    sizes |= {"hidden_size": 128, "mlp_only_layers": [1]}
    make_checkpoint(tmp_path / "base of experts", "qwen3_moe", **sizes)
    make_text(tmp_path / "text.txt")
    alone = runs.with_experts(tmp_path, "adapted experts alone", 4, **runs.ADAPTED)
    losses = [x["loss"] for x in finetune(alone, progress=False).metrics if "loss" in x]
    steps, four_bits = on_two_ranks("adapters", str(tmp_path), DEVICE)
    assert steps == {"steps": 0}
    runs.compare(tmp_path, "adapted experts")
    assert four_bits == pytest.approx(losses, rel=0.02)


if DEVICE == "cuda":
    test_runs_of_adapters = pytest.mark.gpu(two_gpus(test_runs_of_adapters))
