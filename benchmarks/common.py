"""Timing, memory and bookkeeping shared by the benchmarks."""

import gc
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """GPU and versions of everything that takes part."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"python": platform.python_version(), "gpu": gpu}
    for package in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def device_times(run: Callable[[], Any], repeats: int = 20, warmup: int = 5) -> list[float]:
    """Milliseconds of `repeats` calls, each between two events on the device."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # A stretch of other work lets the host run ahead, so that launches are not timed.
        torch.cuda._sleep(2_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def host_microseconds(run: Callable[[], Any], repeats: int = 50) -> float:
    """Median time the host spends in one call, the device's queue being far from full."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most memory held during a call beyond what was held before, its results included."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, read plus written: the ceiling to compare with."""
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    milliseconds = statistics.median(device_times(lambda: target.copy_(source)))
    return 2 * source.nbytes / milliseconds * 1e3


def write(name: str, content: dict[str, Any], folder: Path | None = None) -> None:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append(
            "| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    return "\n".join(lines)
