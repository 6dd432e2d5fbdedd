"""A run of fine-tuning lives through faults: each comes at a random moment of a life.

A round is an undisturbed run, then several lives of another one. A life ends by a kill or by one
of the other faults, or is not hurt at all. The last life is undisturbed. A life must end right (bit
for bit the weights of the undisturbed run) or with one line, and nothing that was complete may be
lost.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable

import torch

from tests.attack.attacks_training import Tiny, flag, in_a_process
from tests.attack.harness import Case, Fault, Result, attack

# What a life calls now and then: a fault comes with one of these calls.
MOMENTS = (
    (os, "replace"),
    (os, "rename"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "open"),
    (builtins, "open"),
    (time, "perf_counter"),  # before and after each step
)


class Round:
    """A run with its undisturbed twin, and what is complete of it."""

    def __init__(self, case: Case) -> None:
        self.draw = case.draw
        self.tiny = Tiny(case)
        self.threads = case.draw.randint(1, 2)  # more only wait for each other on two cores
        self.told = ""  # the last fault, for messages
        twin, out = case.folder / "twin", self.tiny.out
        self.tiny.out = twin
        if self.live(flag("save-total-limit"), "9").code != 0:
            raise Fault("the run does not work at all")
        self.weights = self.tiny.weights()
        self.steps = {file.name: file.read_bytes() for file in self.tiny.checkpoints()}
        self.tiny.out = out

    def live(self, *flags: str, fault: Callable[[], None] | None = None) -> Result:
        """Live one life; `fault` happens at a random moment of it."""
        moment = self.draw.randint(1, self.draw.choice([20, 80, 160]))

        def prepare() -> None:
            torch.set_num_threads(self.threads)
            if fault is not None:
                at_moment(moment, fault)

        arguments = [*self.tiny.arguments(), "--resume", *flags]
        return in_a_process(self.tiny.case, arguments, lambda child: None, prepare)

    def complete(self) -> int:
        """Return the number of the newest checkpoint that is complete."""
        files = [f for f in self.tiny.checkpoints() if f.read_bytes() == self.steps.get(f.name)]
        return max((int(file.stem[5:]) for file in files), default=0)

    def exported(self) -> bool:
        file = self.tiny.out / "model" / "model.safetensors"
        return file.exists() and file.read_bytes() == self.weights

    def check(self, ended: Result) -> None:
        """Require that a life ended right, or with one line."""
        if ended.code == 0 and not self.exported():
            raise Fault(f"after {self.told} the run ends with other weights")
        if ended.code not in (0, -signal.SIGKILL):
            try:
                ended.one_line()
            except Fault as fault:
                raise Fault(f"after {self.told}: {fault}") from None

    # The faults. Each is called within a life, and some also between two lives.

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def full_disk(self) -> None:
        limit = self.draw.choice([0, 100, 1000, 20_000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def truncated_checkpoint(self) -> None:
        if files := self.tiny.checkpoints():
            os.truncate(files[-1], self.draw.randrange(files[-1].stat().st_size))

    def corrupt_shard(self) -> None:
        """Bits of the model that the run started from flip, once the run has begun."""
        file = self.tiny.model / "model.safetensors"
        if (self.tiny.out / "run.json").exists():
            whole = bytearray(file.read_bytes())
            whole[self.draw.randrange(len(whole))] ^= 1 << self.draw.randrange(8)
            file.write_bytes(whole)

    def missing_file(self) -> None:
        """A file of the run, of the data or of the model is gone, once the run has begun."""
        if not (self.tiny.out / "run.json").exists():
            return
        place = self.draw.choice([self.tiny.out, self.tiny.out, self.tiny.model])
        files = [self.tiny.text] if self.draw.random() < 0.1 else list(place.rglob("*"))
        files = [path for path in files if path.is_file()]
        files = [path for path in files if path.name not in (".lock", "notes.txt")]
        if files:
            self.draw.choice(sorted(files)).unlink()

    def clock_jumping_back(self) -> None:
        now = time.time() - self.draw.choice([1, 3600, 10**8])
        time.time = lambda: now
        for path in self.tiny.out.rglob("*"):
            with contextlib.suppress(OSError):
                os.utime(path, (now, now + self.draw.choice([0, 10**9])))


def at_moment(number: int, fault: Callable[[], None]) -> None:
    """Let a fault happen in the n-th call of one of the MOMENTS."""
    left = number

    def around(holder: object, name: str) -> None:
        original = getattr(holder, name)

        def watched(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                fault()
            return original(*args, **kwargs)

        setattr(holder, name, watched)

    for holder, name in MOMENTS:
        around(holder, name)


FAULTS = ("kill", "full_disk", "truncated_checkpoint", "corrupt_shard", "missing_file",
          "clock_jumping_back")  # fmt: skip


@attack("A", 10, weight=3, seconds=240)
def a_run_survives_faults(case: Case) -> None:
    """Kills, a full disk, damaged and missing files and a wrong clock, at random moments."""
    this = Round(case)
    out, draw = this.tiny.out, case.draw
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    text = this.tiny.text.read_bytes()
    model = {path.name: path.read_bytes() for path in this.tiny.model.iterdir()}
    for _ in range(draw.randint(1, 3)):
        fault = draw.choice(FAULTS)
        this.told = fault
        before, had_export = this.complete(), this.exported()
        run_file = out / "run.json"
        settings = run_file.read_bytes() if run_file.exists() else None
        harms = fault in ("truncated_checkpoint", "missing_file")
        if draw.random() < 0.3 and fault in ("corrupt_shard", "missing_file"):
            getattr(this, fault)()
            ended = this.live()
        else:
            ended = this.live(fault=getattr(this, fault))
        this.check(ended)
        if not harms and (this.complete() < before or this.exported() < had_export):
            raise Fault(f"after {fault} a checkpoint or an export that was complete is gone")
        # What a user does: restore the inputs, and remove the checkpoint that the message names.
        this.tiny.text.write_bytes(text)
        for name, content in model.items():
            (this.tiny.model / name).write_bytes(content)
        if harms:
            for file in this.tiny.checkpoints():
                if file.read_bytes() != this.steps.get(file.name):
                    file.unlink()
        if not run_file.exists() and len(os.listdir(out)) > 2:
            if settings is None:
                shutil.rmtree(out)
                out.mkdir()
                (out / "notes.txt").write_text("mine")
            else:
                run_file.write_bytes(settings)
    this.told = "all faults"
    ended = this.live()
    this.check(ended)
    if ended.code != 0:
        raise Fault(f"the last life fails after {fault}: {ended.err[-300:]}")
    wanted = {"notes.txt", *os.listdir(case.folder / "twin")}
    if set(os.listdir(out)) != wanted:
        raise Fault(f"the folder holds {sorted(os.listdir(out))}, expected {sorted(wanted)}")
    if (out / "notes.txt").read_text() != "mine":
        raise Fault("a file of the user is changed")
