"""Run attacks: seeded situations in which nothing may be lost, torn, silently wrong or hang.

An attack is a function of a `Case`. It prepares a situation with `case.draw` and `case.folder`,
lets ligermodels do something, and raises `Fault` if a promise was broken. Each run is a fork of a
process that has imported torch already, so a run costs milliseconds, and a crash, a signal or a
hang ends that run alone and counts as a fault. CUDA does not survive a fork, so GPUs are hidden.

An attack uses only the public names and the command line of ligermodels, so that
`python -m tests.attack --package FOLDER` can attack an older version, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 20.0


class Fault(AssertionError):
    """A promise that was broken."""


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
    """One run of an attack: its random numbers and an empty folder of its own."""

    draw: random.Random
    folder: Path

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


def run_one(one: Attack, seed: int) -> str | None:
    """Run an attack in a fork; return None if everything held, else what broke.

    Files that `Case.folder` shares with nobody are removed afterwards, mounts excepted.
    """
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()  # so that the whole family of processes can be killed
        said = _attempt(one, seed, folder)
        os.write(writing, json.dumps(said).encode()[:60000])
        os._exit(0)
    os.close(writing)
    try:
        return _outcome(child, reading, one.seconds)
    finally:
        os.close(reading)
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


def _attempt(one: Attack, seed: int, folder: Path) -> str | None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(folder)
    renew_threads()
    try:
        one.run(Case(random.Random(f"{one.name}:{seed}"), folder))
    except Fault as fault:
        return str(fault)
    except BaseException:
        return "an exception escaped: " + "".join(traceback.format_exc())[-2000:]
    return None


def _outcome(child: int, reading: int, seconds: float) -> str | None:
    deadline = time.monotonic() + seconds
    said = b""
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"it did not end within {seconds:g} seconds"
        part = os.read(reading, 65536)
        said += part
        if not part or said == b"null":
            break
        with contextlib.suppress(ValueError):
            json.loads(said)
            break
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process died of signal {signal.Signals(os.WTERMSIG(status)).name}"
    result: str | None = json.loads(said)
    return result


@dataclass
class Count:
    runs: int = 0
    faults: int = 0
    examples: list[str] = field(default_factory=list)


def plan(group: str, runs: int, seed: int) -> Iterator[tuple[Attack, int]]:
    """Yield attacks and seeds: each attack gets its share of the runs, and at least one."""
    attacks = [one for one in ATTACKS if one.group == group]
    total = sum(one.weight for one in attacks)
    for one in attacks:
        for number in range(max(1, round(runs * one.weight / total))):
            yield one, seed * 1_000_000 + number
