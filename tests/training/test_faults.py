"""A run of fine-tuning lives through faults that come at random moments of its lives.

A life ends right, with the weights of an undisturbed run, or with one line, and nothing that was
complete is lost. After the user has restored the inputs, an undisturbed life ends right.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ligermodels.cli import main
from tests.training.tiny_run import make_checkpoint, make_text, timeless

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# A fault comes with the n-th call of one of these. The last one is called around each step.
MOMENTS = ((os, "replace"), (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "open"),
           (builtins, "open"), (time, "perf_counter"))  # fmt: skip


def at_moment(left: int, fault: Callable[[], None]) -> None:
    """Let a fault happen before the call number `left` of all MOMENTS."""

    def watched(original):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                fault()
            return original(*args, **kwargs)

        return call

    for holder, name in MOMENTS:
        setattr(holder, name, watched(getattr(holder, name)))


class Run:
    """A run of six steps with checkpoints after 2, 4 and 6, and the faults that come to it."""

    def __init__(self, folder: Path, draw: random.Random | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.draw = draw or random.Random(0)
        self.model = make_checkpoint(folder / "base", **SIZES)
        self.text = make_text(folder / "text.txt", 12)
        self.out = folder / "out"

    def command(self, *flags: str) -> int:
        options = f"--seq-len 32 --batch-size 1 --max-steps 6 --save-steps 2 --eval-steps 3 \
            --learning-rate 1e-2 --device cpu --quiet --resume --train-files {self.text} \
            --output-dir {self.out} --separator"
        return main(["finetune", str(self.model), *flags, *options.split(), ""])

    def live(self, fault: Callable[[], None] | None = None, *flags: str) -> tuple[int, str]:
        """Live one life in a fork; return its exit code and what it says on stderr."""
        moment = self.draw.randint(1, self.draw.choice([20, 80, 160]))
        self.began = time.time()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(writing, 2)
                os.close(writing)
                sys.stderr = os.fdopen(os.dup(2), "w")
                torch.set_num_threads(1)  # The pool of threads does not survive a fork.
                if fault is not None:
                    at_moment(moment, fault)
                code = self.command(*flags)
            except SystemExit as stop:
                code = stop.code
            finally:
                sys.stderr.flush()
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading, errors="replace") as said:
            text = said.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text

    def checkpoints(self) -> list[Path]:
        """Return those that have been written to their end."""
        return sorted((self.out / "checkpoints").glob("step-" + "?" * 8))

    def weights(self) -> bytes | None:
        file = self.out / "model" / "model.safetensors"
        return file.read_bytes() if file.exists() else None

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def full_disk(self) -> None:
        limit = self.draw.choice([0, 100, 1000, 20_000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def cut_checkpoint(self) -> None:
        if folders := self.checkpoints():
            file = self.draw.choice(sorted(folders[-1].iterdir()))
            os.truncate(file, self.draw.randrange(file.stat().st_size))

    def flipped_bit(self) -> None:
        """A bit of the model that the run started from flips, once the run has begun."""
        if (self.out / "run.json").exists():
            file = self.model / "model.safetensors"
            whole = bytearray(file.read_bytes())
            whole[self.draw.randrange(len(whole))] ^= 1 << self.draw.randrange(8)
            file.write_bytes(whole)

    def missing_file(self) -> None:
        """A file of the run, of the data or of the model is gone, once the run has begun.

        It is none that this life writes for the export: nothing reads that again.
        """
        if (self.out / "run.json").exists():
            files = [*self.out.rglob("*"), *self.model.rglob("*"), self.text]
            files = [path for path in files if path.is_file() and path.name != ".lock"]
            files = [
                x for x in files if "model" not in x.parent.name or x.stat().st_mtime < self.began
            ]
            self.draw.choice(sorted(files)).unlink()

    def wrong_clock(self) -> None:
        now = time.time() - self.draw.choice([1, 3600, 10**8])
        time.time = lambda: now
        for path in self.out.rglob("*"):
            with contextlib.suppress(OSError):
                os.utime(path, (now, now + self.draw.choice([0, 10**9])))


FAULTS = ("kill", "full_disk", "cut_checkpoint", "flipped_bit", "missing_file", "wrong_clock")


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """The undisturbed run; all its checkpoints stay."""
    twin = Run(tmp_path_factory.mktemp("twin"))
    # What a run imports takes far longer than its steps, and each fork would import it again.
    Run(tmp_path_factory.mktemp("other")).command()
    assert twin.live(None, "--save-total-limit", "9") == (0, "")
    return twin


def state_of(checkpoint: Path) -> tuple[dict[str, Any], bytes] | None:
    """Return the header and the bytes of the tensors, or None if the checkpoint is not whole."""
    try:
        (name,) = json.loads((checkpoint / "facts.json").read_text())["files"]
        content = (checkpoint / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return json.loads(content[8:end]), content[end:]  # safetensors draws the metadata's order
    except (OSError, ValueError):
        return None


def check_round(twin: Run, folder: Path, faults: Sequence[str], draw: random.Random) -> None:
    this, whole = Run(folder, draw), {each.name: state_of(each) for each in twin.checkpoints()}
    inputs = {path: path.read_bytes() for path in [this.text, *this.model.iterdir()]}
    settings = this.out / "run.json"

    def is_complete(checkpoint: Path) -> bool:
        return state_of(checkpoint) == whole[checkpoint.name]

    def complete() -> tuple[str, bool]:
        """Return the newest checkpoint that is whole, and whether the export is."""
        newest = max((file.name for file in this.checkpoints() if is_complete(file)), default="")
        return newest, this.weights() == twin.weights()

    for fault in faults:
        (newest, exported), begun = complete(), settings.exists() and settings.read_bytes()
        code, said = this.live(getattr(this, fault))
        assert code != 0 or complete()[1], f"other weights after {fault}"
        if code not in (0, -signal.SIGKILL):
            lines = [line for line in said.splitlines() if "arning:" not in line]
            assert code == 2 and len(lines) == 1, f"{fault}: exit code {code}: {said}"
        for path, content in inputs.items():
            path.write_bytes(content)
        if fault not in ("cut_checkpoint", "missing_file"):
            assert complete()[0] >= newest and complete()[1] >= exported, f"lost after {fault}"
            continue
        # The user removes the checkpoint that the message names, and restores the settings.
        for checkpoint in this.checkpoints():
            if not is_complete(checkpoint):
                shutil.rmtree(checkpoint)
        if not settings.exists() and begun:
            settings.write_bytes(begun)
        elif not settings.exists():
            shutil.rmtree(this.out, ignore_errors=True)
    assert this.live() == (0, "") and this.weights() == twin.weights()
    assert "missing_file" in faults or timeless(this.out) == timeless(twin.out)
    assert set(os.listdir(this.out)) == {*os.listdir(twin.out)}


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "fault",  # tests/training/test_inputs.py changes the model of a run, too
    [pytest.param(x, marks=[pytest.mark.long] if x == "flipped_bit" else []) for x in FAULTS],
)
def test_a_run_survives_faults(twin, tmp_path, fault, rounds):
    for number in range(rounds):
        draw = random.Random(f"{fault} {number}")
        more = ["kill"] * 3 if fault == "kill" else draw.choices(FAULTS, k=min(number, 2))
        check_round(twin, tmp_path / str(number), [fault, *more], draw)
