"""Measure losses beyond the next token: python -m benchmarks.losses [--out FOLDER] [--only ...]

At the heads of Llama-3-8B and Gemma-2-9B it measures DPO, GRPO, the Jensen-Shannon divergence from
a teacher and four Medusa heads, beside Liger's fused losses, TRL's kernels, eager PyTorch and
torch.compile, and linear CE. Each loss and size runs in its own process. For each it prints time,
peak and scratch memory, and the share of the matrix products' time, and writes losses.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Random
from benchmarks.cases.token_losses import LOSSES, PRODUCTS
from benchmarks.common import RESULTS, environment, release_memory, table, write
from benchmarks.ops import Row, attempt, measure, product_times

MODE = "forward + backward"
COLUMNS = ["loss", "rows", "vocab", "implementation", "ms", "share", "peak GB", "scratch GB"]


def measure_loss(loss: str, index: int, part: Path, small: bool, without: list[str]) -> None:
    """Measure every implementation of a loss at one size; rewrite the file after each."""
    entry = LOSSES[loss]
    size = entry.small if small else entry.sweep[index]
    random = Random()
    case = entry.build(random, **size)
    assert case.products is not None
    times = product_times(random, *case.products)
    release_memory()
    counts = PRODUCTS.get(loss, (1, 1, 1))
    floor = sum(count * ms for count, ms in zip(counts, times))
    rows: list[Row] = []
    for name in case.implementations:
        if name in without:
            continue
        implementation = case.implementation(name)
        row = attempt(
            {"op": loss, "sizes": size, "implementation": name},
            lambda i=implementation: measure(i, random, False),  # type: ignore[misc]
        )
        if MODE in row:
            row[MODE] |= {"floor ms": floor, "share": floor / row[MODE]["ms"]}
        rows.append(row)
        print(table([shown(row)], COLUMNS).splitlines()[-1], flush=True)
        part.write_text(json.dumps(rows))
        torch._dynamo.reset()


def shown(row: Row) -> dict[str, Any]:
    """Return the cells of a row for the table that is printed."""
    cells = {"loss": row["op"], "implementation": row["implementation"], **row["sizes"]}
    return cells | row.get(MODE, {"ms": row.get("error", "")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="LOSS")
    parser.add_argument("--sizes", nargs="+", type=int, help="numbers of the sizes, from 0")
    parser.add_argument("--small", action="store_true", help="one small size, to try it out")
    parser.add_argument("--without", nargs="+", default=[], help="implementations to leave out")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a loss and size")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        index, part = arguments.worker
        measure_loss(arguments.only[0], int(index), Path(part), arguments.small, arguments.without)
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    results: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for loss in arguments.only:
            count = 1 if arguments.small else len(LOSSES[loss].sweep)
            for index in arguments.sizes or range(count):
                part = Path(folder) / f"{loss}-{index}.json"
                command = [sys.executable, "-m", "benchmarks.losses", "--only", loss]
                command += ["--small"] * arguments.small
                command += ["--without", *arguments.without] if arguments.without else []
                command += ["--worker", str(index), str(part)]
                fault = None
                try:
                    status = subprocess.run(command, timeout=arguments.timeout).returncode
                    fault = f"its process ended with status {status}" if status else None
                except subprocess.TimeoutExpired:
                    fault = f"stopped after {arguments.timeout:.0f} s"
                results += json.loads(part.read_text()) if part.exists() else []
                if fault:
                    size = LOSSES[loss].small if arguments.small else LOSSES[loss].sweep[index]
                    results.append(
                        {"op": loss, "sizes": size, "implementation": "the rest", "error": fault}
                    )
                write("losses.json", {"environment": environment(), "rows": results}, arguments.out)
    print(table([shown(row) for row in results], COLUMNS))


if __name__ == "__main__":
    main()
