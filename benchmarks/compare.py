"""Compare two checkouts: python -m benchmarks.compare OTHER_CHECKOUT [--out FOLDER]

This measures each op at the sizes of its table, its host time, and a training step of Llama-3-8B.
The two checkouts run alternately, in the order A B B A, so that a drift of the machine affects both
equally. Each runs in its own process with its own `benchmarks`. compare.json holds the medians of
both and their quotient. A quotient near 1 means that nothing changed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import environment, table, write

HERE = Path(__file__).resolve().parent.parent
ORDER = ("other", "this", "this", "other")
STEPS = (("1", "8192"), ("16", "512"))
# This also runs in the other checkout, so it uses only what older benchmarks have, too.
WORKER = """
import json, statistics, sys
import torch
from benchmarks import ops
from benchmarks.cases import OPS, Random

found, calls = {}, {}
def named(op, sizes):
    return f"{op} {' x '.join(map(str, sizes.values()))}"
for op, entry in OPS.items():
    for sizes in entry.table:
        random = Random()
        case = entry.build(random, **sizes)
        for name in case.implementations:
            if name.startswith("ligermodels"):
                row = ops.measure(case.implementation(name), random, False)["forward + backward"]
                tag = named(op, sizes) + name.removeprefix("ligermodels")
                found[tag] = {"ms": row["ms"], "scratch GB": row["scratch GB"]}
        del case
        ops.release_memory()
random = Random()
for op, entry in OPS.items():
    if entry.host:
        sizes = entry.host if isinstance(entry.host, dict) else entry.small
        case = entry.build(random, **sizes)
        run, *_ = ops.training_call(case.implementation("ligermodels"), random)
        run()
        calls["host of " + named(op, sizes)] = ops.HostCall({}, run)
generator = torch.Generator().manual_seed(0)
for call in ops.turns(list(calls.values()), 300, generator):
    call.take()
for tag, call in calls.items():
    found[tag] = {"us": statistics.median(call.times)}
print(json.dumps(found))
"""


def run(checkout: Path, *arguments: str) -> dict[str, Any]:
    """Run Python in a checkout, and return the JSON in the last line that it prints."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{checkout}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(checkout: Path, with_step: bool) -> dict[str, float]:
    """Return every figure of a checkout, by what was measured and the unit."""
    found = run(checkout, "-c", WORKER)
    if with_step:
        for batch, seq in STEPS:
            only = ("--only", "ligermodels", batch, seq)
            row = run(checkout, "-m", "benchmarks.step", *only)
            found[f"step {batch} x {seq}"] = {"ms": row["ms"], "GiB": row["peak GiB"]}
    return {f"{tag}, {unit}": value for tag, row in found.items() for unit, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--out", type=Path, default=HERE / "build", help="folder of compare.json")
    parser.add_argument("--without-step", action="store_true", help="measure only the ops")
    given = parser.parse_args()
    checkouts = {"this": HERE, "other": given.other.resolve()}
    figures: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    for name in ORDER:
        figures[name].append(measure(checkouts[name], not given.without_step))
        print(f"{name}: {len(figures[name][-1])} figures", flush=True)
    rows = []
    for tag in figures["this"][0]:
        medians = {
            name: statistics.median(run[tag] for run in runs if tag in run)
            for name, runs in figures.items()
            if tag in runs[0]
        }
        if len(medians) == 2:
            quotient = medians["this"] / medians["other"] if medians["other"] else None
            rows.append({"what": tag, **medians, "this / other": quotient})
    write("compare.json", {"environment": environment(), "rows": rows}, given.out)
    print(table(rows, ["what", "other", "this", "this / other"]))


if __name__ == "__main__":
    main()
