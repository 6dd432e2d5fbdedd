"""Time a load beside safetensors' own load and copy: python -m benchmarks.load FOLDER...

The three implementations take turns in one process, and the files stay in the page cache:

- `ligermodels`: `AutoLiger.from_hf(folder)`, which also builds the model and checks every value;
- `safetensors, new memory`: `load_file` of every shard, and `copy_` of every tensor into a
  tensor that was allocated before the clock starts, and never written to;
- `safetensors, used memory`: the same into tensors that were written to before. A model that
  is loaded once has no such memory. The difference is the time in which the kernel provides it.

In its turn, an implementation loads twice, and the second load is timed. The host of a virtual
machine may take back memory that has been free for seconds ("free page reporting"), and the first
load then waits for the host.
"""

import argparse
import ctypes
import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import environment, write
from ligermodels import AutoLiger

OURS, NEW, USED = "ligermodels", "safetensors, new memory", "safetensors, used memory"
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


def processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def turns(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Return the median and least milliseconds of each implementation, by wall and CPU clock."""
    shards = sorted(folder.glob("*.safetensors"))
    used = {k: torch.zeros_like(v) for shard in shards for k, v in load_file(shard).items()}

    def new() -> dict[str, Tensor]:
        return {name: torch.empty_like(tensor) for name, tensor in used.items()}

    def copy(parameters: dict[str, Tensor]) -> None:
        for shard in shards:
            for name, tensor in load_file(shard).items():
                parameters[name].copy_(tensor)

    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        OURS: (lambda: None, lambda _: AutoLiger.from_hf(folder)),
        NEW: (new, copy),
        USED: (lambda: used, copy),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in tqdm(
        range(repeats + 1), desc=f"{folder.name}, {torch.get_num_threads()} threads", disable=None
    ):
        for name, (prepare, load) in ways.items():
            for _ in range(2):
                prepared = prepare()
                gc.collect()
                start, cpu_start = time.perf_counter(), time.process_time()
                result = load(prepared)
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
                del result, prepared
            if turn:  # the first one fills the page cache
                wall[name].append(seconds * 1e3)
                cpu[name].append(cpu_seconds * 1e3)
    return {
        name: {
            "ms": statistics.median(wall[name]),
            "least ms": min(wall[name]),
            "cpu ms": statistics.median(cpu[name]),
            "least cpu ms": min(cpu[name]),
        }
        for name in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for load.json")
    arguments = parser.parse_args()
    if sys.platform == "linux":
        # Without this, glibc hands out the memory of the previous turn again, which depends on the
        # order of the turns. A process that loads one model gets new memory.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    rows = []
    for folder in arguments.checkpoints:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        dtype = str(AutoLiger.from_hf(folder).source.dtype).removeprefix("torch.")
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            times = turns(folder, arguments.repeats)
            row = {
                "checkpoint": f"{folder.name}, {dtype}",
                "bytes": size,
                "threads": threads,
                "times": times,
                f"{OURS} / {NEW}": {
                    clock: times[OURS][clock] / times[NEW][clock] for clock in times[OURS]
                },
            }
            rows.append(row)
            print(row)
    machine = environment() | {"safetensors": version("safetensors"), "processor": processor()}
    machine |= {"cores": str(os.cpu_count()), "system": platform.platform()}
    write(
        "load.json",
        {"environment": machine, "repeats": arguments.repeats, "rows": rows},
        arguments.out,
    )


if __name__ == "__main__":
    main()
