"""Load and save a checkpoint whose parameters are spread over ranks (FSDP2), on GPUs or the CPU.

    torchrun --nproc-per-node 4 -m benchmarks.sharded_files [--device cpu] [--preset P] [--layers N]

Rank 0 first writes a checkpoint of random weights in bfloat16 into $TMPDIR. Its files then stay in
the page cache. Seconds are those of the slowest rank. Memory is the peak of a rank's process, and
what it had before: a row shows what its work took. The last row reads all tensors with safetensors
into new memory, in one process. The table goes into sharded_files.json in $OUT, or else in
benchmarks/results.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from benchmarks.common import RESULTS, environment
from benchmarks.ranks import GIB, Row, everywhere
from ligermodels import LigerLlama, LlamaConfig, shard
from ligermodels.converters import export
from ligermodels.converters.hf_config import to_hf

BLOCK = 2**24  # bytes that are compared at once


def status(name: str) -> int:
    """Return a number of bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def measured(name: str, work: Callable[[], Any]) -> Row:
    """Run a part on all ranks; return its seconds and the most that a rank read and held."""
    gc.collect()
    dist.barrier()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held, read, start = status("VmRSS"), bytes_read(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    facts = (seconds, bytes_read() - read, held, status("VmHWM"))
    every = everywhere(facts)
    dist.barrier()
    row = {
        "name": name,
        "s": max(fact[0] for fact in every),
        "most GiB read": max(fact[1] for fact in every) / GIB,
        "GiB read by all": sum(fact[1] for fact in every) / GIB,
        "GiB before": max(fact[2] for fact in every) / GIB,
        "peak GiB": max(fact[3] for fact in every) / GIB,
        "peak GiB of all": sum(fact[3] for fact in every) / GIB,
    }
    if dist.get_rank() == 0:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def write(folder: Path, config: LlamaConfig) -> None:
    """Write a checkpoint of random numbers, which repeat, because making them takes longest."""
    _, weight_map = LigerLlama.on_meta(config)
    shapes = {entry.name: entry.shape for entry in weight_map}
    tile = torch.randn(2**24).to(torch.bfloat16)

    def values(name: str) -> Tensor:
        made = torch.empty(shapes[name], dtype=torch.bfloat16)
        offset = sum(name.encode()) * 1009  # no two tensors are the same
        for part in made.flatten().split(len(tile) - offset):
            part.copy_(tile[offset : offset + len(part)])
        return made

    dtypes = dict.fromkeys(shapes, torch.bfloat16)
    export.save(folder, to_hf(config), weight_map, values, dtypes=dtypes)


def copy_all(folder: Path) -> dict[str, Tensor]:
    """Read all tensors with safetensors into new memory."""
    copies = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                copies[name] = torch.empty_like(tensor := opened.get_tensor(name))
                copies[name].copy_(tensor)
    return copies


def differing(first: Path, second: Path, every: int) -> int:
    """Return how many blocks of the files of two folders differ, of every so many of them."""
    found = 0
    for file in sorted(path for path in first.iterdir() if path.is_file()):
        with file.open("rb") as ours, (second / file.name).open("rb") as theirs:
            for start in range(0, file.stat().st_size, BLOCK * every):
                ours.seek(start), theirs.seek(start)
                found += ours.read(BLOCK) != theirs.read(BLOCK)
        found += file.stat().st_size != (second / file.name).stat().st_size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    gpus = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument("--preset", default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    given = parser.parse_args()
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = LlamaConfig.preset(given.preset, dtype="bfloat16")
    config.num_hidden_layers = given.layers or config.num_hidden_layers
    folders = [tempfile.mkdtemp(dir=os.environ.get("TMPDIR")) if rank == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    model, again = folder / "model", folder / "again"
    kept: list[Any] = []

    def load() -> None:
        made = LigerLlama.from_hf(model, device="meta")
        kept.append(shard(made))

    def alone(work: Callable[[], Any]) -> Callable[[], Any]:
        return work if rank == 0 else lambda: None

    try:
        rows = [measured("write by 1, tensor by tensor", alone(lambda: write(model, config)))]
        rows.append(measured(f"load by {ranks}", load))
        rows.append(measured(f"save by {ranks}", lambda: kept[0].save_hf(again)))
        kept.clear()
        if rank == 0:
            found = differing(model, again, every=8)
            print(f"blocks that differ, of every eighth one of 16 MiB: {found}", flush=True)
        rows.append(measured("safetensors by 1", alone(lambda: kept.append(copy_all(model)))))
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    if rank == 0:
        file = Path(os.environ.get("OUT", RESULTS)) / "sharded_files.json"
        content = json.loads(file.read_text()) if file.is_file() else {}
        title = f"{given.preset}, {config.num_hidden_layers} layers, {ranks} x {given.device}"
        machine = environment() | {"cores": str(os.cpu_count())}
        content[title] = {"environment": machine, "blocks that differ": found, "rows": rows}
        file.write_text(json.dumps(content, indent=1) + "\n")
        print(title, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
