"""What our kernels move, by the hardware's counters: python -m benchmarks.counters [--out FOLDER]

Runs one call, forward + backward, of each op on rows at its table sizes under Nsight Compute
(`ncu` must be on the PATH and allowed to read counters), and writes counters.json and counters.md:
bytes read from and written to device memory beside the fewest that the op can move, and the share
of its peak bandwidth that the memory was busy with. Clocks are left as they are.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import OPS, Random
from benchmarks.common import RESULTS, environment, table, write
from benchmarks.ops import training_call
from benchmarks.plots import LABELS, size_text

MARKER = "spin_kernel"  # torch.cuda._sleep: ends what belongs to one op
METRICS = {
    "gpu__time_duration.sum": "ms",
    "dram__bytes_read.sum": "read GB",
    "dram__bytes_write.sum": "written GB",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory busy %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors busy %",
}
SCALES = {"ms": 1e-6, "read GB": 1e-9, "written GB": 1e-9}


def calls() -> list[tuple[str, dict[str, Any]]]:
    """Ops and sizes, in the order in which they run."""
    row_ops = [op for op in LABELS if not op.startswith("linear")]
    return [(op, sizes) for op in row_ops for sizes in OPS[op].table]


def run() -> None:
    """One call of each, between the profiler's start and stop, a marker behind each."""
    for op, sizes in calls():
        random = Random()
        case = OPS[op].build(random, **sizes)
        call, *_ = training_call(case.implementation("ligermodels"), random)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def parse(text: str) -> list[list[dict[str, Any]]]:
    """Kernels with their metrics, from ncu's CSV in base units, in one list for each marker."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        if name := METRICS.get(row["Metric Name"]):
            kernel[name] = float(row["Metric Value"].replace(",", "")) * SCALES.get(name, 1.0)
    groups: list[list[dict[str, Any]]] = [[]]
    for kernel in kernels.values():
        if MARKER in kernel["kernel"]:
            groups.append([])
        else:
            groups[-1].append(kernel)
    return groups[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for counters.json and counters.md")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return run()
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--csv"]
    command += [
        "--profile-from-start",
        "off",
        "--print-units",
        "base",
        "--metrics",
        ",".join(METRICS),
    ]
    command += [sys.executable, "-m", "benchmarks.counters", "--run"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ncu ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
    rows = []
    for (op, sizes), kernels in zip(calls(), parse(done.stdout), strict=True):
        case = OPS[op].build(Random("cpu"), **sizes)
        assert case.bytes is not None
        for kernel in kernels:
            rows.append({"op": LABELS[op], "size": size_text(sizes), **kernel})
        moved = sum(kernel["read GB"] + kernel["written GB"] for kernel in kernels)
        total = {"op": LABELS[op], "size": size_text(sizes), "kernel": "**all**"}
        total |= {"ms": sum(kernel["ms"] for kernel in kernels), "moved GB": moved}
        rows.append(total | {"fewest GB": case.bytes[1] / 1e9})
    write("counters.json", {"environment": environment(), "rows": rows}, arguments.out)
    columns = ["op", "size", "kernel", "ms", "read GB", "written GB", "moved GB", "fewest GB"]
    text = table(rows, [*columns, "memory busy %", "multiprocessors busy %"])
    ((arguments.out or RESULTS) / "counters.md").write_text(text + "\n")
    print(json.dumps(environment()), text, sep="\n")


if __name__ == "__main__":
    main()
