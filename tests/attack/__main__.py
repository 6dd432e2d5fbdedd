"""Attack ligermodels and count what held.

    python -m tests.attack [GROUP ...] --runs 1000 [--seed 0] [--only NAME] [--out counts.json]

The exit code is 1 if anything broke.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from tests.attack.harness import ATTACKS, Count, Outcome, plan, run_one

GROUPS = "ABCDE"


def load_attacks() -> None:
    """Import every module of this folder that registers attacks."""
    for file in sorted(Path(__file__).parent.glob("attacks_*.py")):
        importlib.import_module(f"tests.attack.{file.stem}")


def run_numbered(
    job: tuple[int, int], limit: float, deadline: float
) -> tuple[int, int, Outcome | None]:
    """Run the attack of a number with a seed, unless it is too late."""
    number, seed = job
    late = time.monotonic() > deadline
    return number, seed, None if late else run_one(ATTACKS[number], seed, limit)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS))
    parser.add_argument("--runs", type=int, default=1000, help="runs of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seconds", type=float, help="start no run after this time")
    parser.add_argument("--limit", type=float, default=1e9, help="end each run after these seconds")
    parser.add_argument("--only", default="", help="only attacks whose name has this expression")
    parser.add_argument("--out", type=Path, help="write the counts here as JSON")
    options = parser.parse_args()

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A shell starts background jobs with SIGINT ignored, and each program that is attacked would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not survive a fork.
    import torch
    import torch._dynamo  # optimizers import it on first use; this way each fork has it already

    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # A fork would find the lock of tqdm's thread held for ever.
    load_attacks()
    jobs = [
        (ATTACKS.index(one), seed)
        for group in options.groups
        for one, seed in plan(group, options.runs, options.seed, options.only)
    ]
    # The slow ones are spread, and what there is no time for is of all attacks alike.
    random.Random(options.seed).shuffle(jobs)
    deadline = float("inf") if options.seconds is None else time.monotonic() + options.seconds
    run = partial(run_numbered, limit=options.limit, deadline=deadline)
    counts: dict[int, Count] = defaultdict(Count)
    with multiprocessing.get_context("fork").Pool(options.jobs) as workers:
        for number, seed, outcome in tqdm(
            workers.imap_unordered(run, jobs), total=len(jobs), unit="run"
        ):
            if outcome is not None:
                counts[number].add(seed, outcome)

    report(counts, options.groups, options.out)
    return int(any(count.faults for count in counts.values()))


def report(counts: dict[int, Count], groups: Sequence[str], out: Path | None) -> None:
    """Write the counts to `out` as JSON, and print them.

    The JSON comes first, so that a printer that fails does not lose it. Examples have text that is
    not Unicode, which is printed with escapes.
    """
    ordered = sorted(counts.items(), key=lambda item: _key(item[0]))
    if out:
        keys = ("group", "fault", "attack")
        rows = [
            dict(zip(keys, _key(number), strict=True)) | vars(count) for number, count in ordered
        ]
        out.write_text(json.dumps(rows, indent=1) + "\n")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for number, count in ordered:
        group, fault, name = _key(number)
        skipped = f"{count.skipped:6} impossible on this machine" if count.skipped else ""
        print(f"{group} {fault:>2} {name:50} {count.runs:6} runs {count.faults:6} faults{skipped}")
        for label, (runs, faults) in sorted(count.by_label.items()):
            print(f"     {label:52} {runs:5} runs {faults:6} faults")
        for label, example in list(count.examples.items())[:3]:
            text = example.strip().replace("\n", "\n      ")
            print(f"      {label}: {text}")
    for group in groups:
        of = [count for number, count in ordered if ATTACKS[number].group == group]
        print(f"group {group}: {sum(c.runs for c in of)} runs, {sum(c.faults for c in of)} faults")


def _key(number: int) -> tuple[str, int, str]:
    one = ATTACKS[number]
    return one.group, one.fault, one.name


if __name__ == "__main__":
    sys.exit(main())
