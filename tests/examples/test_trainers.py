"""The examples of trainers train as one process does, and as transformers' model does in them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ligermodels.models.auto import AutoLiger
from tests import markdown
from tests.examples import ray_cases
from tests.examples.trainer_cases import INSTALL, RANKS, TOOLS
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.long  # a break of these tools is not one of the library


def test_two_processes(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """They equal one process, and transformers' model in the same tool."""
    report = run_ranks("tests.examples.trainer_cases", RANKS, tmp_path)
    for name, outcome in report.items():
        with subtests.test(name):
            assert isinstance(outcome, dict), outcome
            assert len(outcome) == 3
            for what, error in outcome.items():
                assert error <= 1e-5, f"{what} differs by {error}"
    for tool, module in TOOLS.items():
        with subtests.test(tool):
            if find_spec(module) is None:
                pytest.skip(INSTALL)
            assert any(name.startswith(tool) for name in report)


@pytest.mark.parametrize("module", ["accelerate_loop", "lightning_module", "deepspeed_zero"])
def test_the_scripts_run(module: str, smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip(module.partition("_")[0], reason=INSTALL)
    model = markdown.small_checkpoint(smollm2, tmp_path / "model")
    text = tmp_path / "text.txt"
    novel = markdown.ROOT / "examples" / "data" / "persuasion-heldout.txt"
    text.write_text(novel.read_text(encoding="utf-8")[:10_000])
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(model), str(text), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *command, "-m", f"examples.trainers.{module}", *arguments],
        cwd=markdown.ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert AutoLiger.from_hf(tmp_path / "out").config.vocab_size > 0


def test_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=INSTALL)
    # Ray leaves threads and handlers of signals in its process, which later tests would meet.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with ProcessPoolExecutor(1, context) as pool:
        run = pool.submit(ray_cases.errors, ["llama"], tmp_path)
    (found,) = run.result().values()
    assert len(found) == 3 and max(found.values()) < 1e-5
