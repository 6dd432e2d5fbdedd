"""Lightning's and accelerate's FSDP on two GPUs equal one process; FSDP 1 runs only on GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.trainer_cases import TOOLS, checkpoint

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tool, tied", [("fsdp1", True), ("fsdp2", False), ("accelerate", True)])
def test_losses(tool: str, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip(TOOLS["accelerate" if tool == "accelerate" else "Lightning"])
    folder = checkpoint(tmp_path, tied)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.gpu.trainer_ranks", tool, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    losses, expected = json.loads(line.removeprefix("RESULT"))
    assert losses == pytest.approx(expected, rel=1e-5)
