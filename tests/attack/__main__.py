"""Attack ligermodels and count what held.

    python -m tests.attack [GROUP ...] --runs 1000 [--seed 0] [--only NAME] [--out counts.json]

To attack an older version, check it out into a folder and name that folder with --package.
The exit code is 1 if anything broke.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from tests.attack.harness import ATTACKS, Count, plan, run_one

GROUPS = "ABCDE"


def load_attacks() -> None:
    """Import every module of this folder that registers attacks."""
    for file in sorted(Path(__file__).parent.glob("attacks_*.py")):
        importlib.import_module(f"tests.attack.{file.stem}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS))
    parser.add_argument("--runs", type=int, default=1000, help="runs of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="start no run after this time")
    parser.add_argument("--only", help="run only attacks with this text in their name")
    parser.add_argument("--package", help="attack the ligermodels in this folder")
    parser.add_argument("--out", type=Path, help="write the counts here as JSON")
    options = parser.parse_args()

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not survive a fork.
    import torch
    import torch._dynamo  # optimizers import it on first use; this way each fork has it already

    if options.package:
        sys.path.insert(0, options.package)
    import ligermodels

    if options.package:
        del sys.path[0]
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # A fork would find the lock of tqdm's thread held for ever.
    load_attacks()
    counts: dict[tuple[str, int, str], Count] = defaultdict(Count)
    runs = [
        (one, seed)
        for group in options.groups
        for one, seed in plan(group, options.runs, options.seed)
        if not options.only or options.only in one.name
    ]
    if options.seconds is not None:  # What there is no time for is then of all attacks alike.
        random.Random(options.seed).shuffle(runs)
    print(f"ligermodels from {Path(ligermodels.__file__).parent}, {len(ATTACKS)} attacks")
    began = time.monotonic()
    for one, seed in tqdm(runs, unit="run"):
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        count = counts[one.group, one.fault, one.name]
        count.runs += 1
        broken = run_one(one, seed)
        if broken is not None:
            count.faults += 1
            if len(count.examples) < 3:
                count.examples.append(f"seed {seed}: {broken}")
    for (group, fault, name), count in sorted(counts.items()):
        print(f"{group} {fault:>2} {name:50} {count.runs:6} runs {count.faults:6} faults")
        for example in count.examples:
            print("      " + example.strip().replace("\n", "\n      ")[-600:])
    for group in options.groups:
        of = [c for key, c in counts.items() if key[0] == group]
        print(f"group {group}: {sum(c.runs for c in of)} runs, {sum(c.faults for c in of)} faults")
    if options.out:
        rows = [
            {"group": g, "fault": f, "attack": n, "runs": c.runs, "faults": c.faults}
            for (g, f, n), c in sorted(counts.items())
        ]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(count.faults for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
