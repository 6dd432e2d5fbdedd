"""What benchmarks on several ranks share: times of the slowest rank, and rows of results."""

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import release_memory
from ligermodels import LlamaConfig

GIB = 2**30
PRESET = "llama-3-8b"
TINY: dict[str, Any] = {}  # sizes of a small model, with --tiny
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = timedelta(seconds=90)  # how long a rank may be behind the others at the end of a case
Row = dict[str, Any]


def mesh(**sizes: int) -> Any:
    return init_device_mesh(DEVICE, (*sizes.values(),), mesh_dim_names=(*sizes,))


def config(layers: int | None, **changes: Any) -> LlamaConfig:
    made = LlamaConfig.preset(PRESET, **TINY, **changes)
    if layers:
        made.num_hidden_layers = layers
    return made


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of a call on the slowest rank."""
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return max(everywhere((time.perf_counter() - start) * 1e3))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def attempt(name: str, measure: Callable[[], Row]) -> Row:
    """Return a row; an error becomes part of it, so that the other rows are measured.

    Raises: RuntimeError, which names the ranks that do not come to the end.
    """
    gc.collect()
    release_memory()
    start = time.perf_counter()
    try:
        row = {"name": name, **measure()}
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        row = {"name": name, "error": text}
        print(f"rank {dist.get_rank()}: {row}", flush=True)
    row["seconds of the case"] = time.perf_counter() - start
    dist.monitored_barrier(dist.new_group(backend="gloo"), LIMIT, wait_all_ranks=True)
    show(row)
    return row


def show(row: Row) -> None:
    """Print a row at once: a part that is stopped has shown what it has measured."""
    if dist.get_rank() == 0:
        print({k: round(v, 8) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def table(title: str, rows: list[Row]) -> str:
    columns = [*dict.fromkeys(key for row in rows for key in row)]
    lines = [title, "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        texts = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)
