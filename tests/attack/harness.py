"""Run attacks: seeded situations in which nothing may be lost, torn, silently wrong or hang.

An attack is a function of a `Case`. It prepares a situation with `case.draw` and `case.folder`,
lets ligermodels do something, and raises `Fault` if a promise was broken. Each run is a fork of a
process that has imported torch already, so a run costs milliseconds, and a crash, a signal or a
hang ends that run alone and counts as a fault. CUDA does not survive a fork, so GPUs are hidden.

An attack uses only the public names and the command line of ligermodels.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

SECONDS = 20.0
T = TypeVar("T")


class Fault(AssertionError):
    """A promise that was broken. `label` says which of the case's labels, if not all of them."""

    def __init__(self, message: str, label: str | None = None) -> None:
        super().__init__(message)
        self.label = label


class Skip(Exception):
    """This machine cannot make the situation, so nothing was attacked."""


@dataclass
class Result:
    """What a command returned. `code` is None if an exception escaped from it."""

    code: int | None
    out: str
    err: str

    def one_line(self, *words: str) -> None:
        """Require a refusal: exit code 2 and one line on stderr that has these words."""
        if self.code != 2 or "Traceback" in self.err:
            raise Fault(f"expected a refusal, got exit code {self.code}: {self.err[-400:]}")
        lines = [line for line in self.err.splitlines() if "arning:" not in line]
        if len(lines) != 1:
            raise Fault(f"{len(lines)} lines on stderr instead of one: {self.err[-400:]}")
        for word in words:
            if word not in self.err:
                raise Fault(f"{word!r} is not in the message: {self.err[-400:]}")

    def fine_or_one_line(self) -> None:
        """Require success, or a refusal in one line."""
        if self.code != 0:
            self.one_line()


@dataclass
class Case:
    """One run of an attack: its random numbers, an empty folder of its own, and its labels.

    A label names the situation or the promise; runs and faults are counted for each label. Labels
    lie in memory that the parent process sees, so that a run that hangs or dies has them, too.
    """

    draw: random.Random
    folder: Path
    seed: int = 0
    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1024))

    def label(self, *labels: str) -> None:
        """Count this run under these labels, and under no others."""
        text = json.dumps(labels).encode()
        self.shared[:] = text.ljust(len(self.shared), b"\0")

    def turn(self, kinds: Sequence[T]) -> T:
        """Return the kind whose turn it is (one per seed), and count this run under its name."""
        kind = kinds[self.seed % len(kinds)]
        self.label(str(kind))
        return kind

    def labels(self) -> list[str]:
        found: list[str] = json.loads(self.shared[:].rstrip(b"\0") or b"[]")
        return found

    def cli(self, *arguments: object, stdin: str | bytes = b"") -> Result:
        """Run a command of ligermodels in this process."""
        from ligermodels.cli import main

        text = stdin.encode() if isinstance(stdin, str) else stdin
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        code: int | None = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            kept, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(text), "utf-8")
            try:
                code = main([os.fspath(x) if isinstance(x, Path) else str(x) for x in arguments])
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                traceback.print_exc(file=err)
            finally:
                sys.stdin = kept
        read = [x.buffer.getvalue().decode("utf-8", "replace") for x in (out, err)]  # type: ignore[attr-defined]
        return Result(code, *read)


@dataclass(frozen=True)
class Attack:
    group: str  # "A" to "E"
    fault: int  # the number of the fault that it looks for
    run: Callable[[Case], None]
    weight: int  # how many of the runs of its group it gets, relative to the others
    seconds: float  # the time limit of one run

    @property
    def name(self) -> str:
        return self.run.__name__


ATTACKS: list[Attack] = []


def attack(
    group: str, fault: int, weight: int = 1, seconds: float = SECONDS
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register an attack."""

    def register(run: Callable[[Case], None]) -> Callable[[Case], None]:
        ATTACKS.append(Attack(group, fault, run, weight, seconds))
        return run

    return register


@dataclass
class Outcome:
    """What became of a run: broken is None if everything held."""

    broken: str | None
    skipped: bool = False
    label: str | None = None  # the one that is broken; None: all
    labels: list[str] = field(default_factory=list)


def run_one(one: Attack, seed: int, limit: float = float("inf")) -> Outcome:
    """Run an attack in a fork, for at most `limit` seconds.

    Files that `Case.folder` shares with nobody are removed afterwards, mounts excepted.
    """
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    case = Case(random.Random(f"{one.name}:{seed}"), folder, seed)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()  # so that the whole family of processes can be killed
        said = _attempt(one, case)
        os.write(writing, json.dumps(said).encode()[:60000])
        os._exit(0)
    os.close(writing)
    try:
        outcome = _outcome(child, reading, min(one.seconds, limit))
        outcome.labels = case.labels()
        return outcome
    finally:
        os.close(reading)
        case.shared.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def renew_threads(number: int = 1) -> None:
    """Let a fork make torch's pool of threads anew; the first operations of two threads race to."""
    import torch

    torch.set_num_threads(number)


def address_space() -> int:
    """Return how many bytes this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _attempt(one: Attack, case: Case) -> dict[str, object]:
    """Run an attack in this process; return the arguments of its `Outcome`."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(case.folder)
    renew_threads()
    try:
        one.run(case)
    except Fault as fault:
        return {"broken": str(fault)[:8000], "label": fault.label}
    except Skip as reason:
        return {"broken": None, "skipped": True, "label": str(reason)}
    except BaseException:
        return {"broken": "an exception escaped: " + "".join(traceback.format_exc())[-2000:]}
    return {"broken": None}


def _outcome(child: int, reading: int, seconds: float) -> Outcome:
    deadline = time.monotonic() + seconds
    said = b""
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome(f"it did not end within {seconds:g} seconds")
        part = os.read(reading, 65536)
        said += part
        if not part:
            break
        with contextlib.suppress(ValueError):
            json.loads(said)
            break
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome(f"the process died of signal {signal.Signals(os.WTERMSIG(status)).name}")
    return Outcome(**json.loads(said))


@dataclass
class Count:
    """How often an attack ran, and how often it broke something, also by label."""

    runs: int = 0
    faults: int = 0
    skipped: int = 0
    by_label: dict[str, list[int]] = field(default_factory=dict)  # label -> [runs, faults]
    examples: dict[str, str] = field(default_factory=dict)  # label -> the first fault

    def add(self, seed: int, outcome: Outcome) -> None:
        self.runs += not outcome.skipped
        self.skipped += outcome.skipped
        self.faults += outcome.broken is not None
        for label in [] if outcome.skipped else outcome.labels:
            broken = outcome.broken is not None and outcome.label in (None, label)
            was = self.by_label.setdefault(label, [0, 0])
            self.by_label[label] = [was[0] + 1, was[1] + broken]
        if outcome.broken is not None:
            label = outcome.label or ", ".join(outcome.labels)
            self.examples.setdefault(label, f"seed {seed}: {outcome.broken[-600:]}")


def plan(group: str, runs: int, seed: int, only: str = "") -> Iterator[tuple[Attack, int]]:
    """Yield attacks and seeds: each attack gets its share of the runs, and at least one.

    Args: only, a regular expression that the names of the attacks contain.
    """
    attacks = [one for one in ATTACKS if one.group == group and re.search(only, one.name)]
    total = sum(one.weight for one in attacks)
    for one in attacks:
        for number in range(max(1, round(runs * one.weight / total))):
            yield one, seed * 1_000_000 + number
