"""Timing, memory and bookkeeping shared by the benchmarks."""

import gc
import importlib.metadata
import itertools
import json
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """GPU and versions of everything that takes part."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"python": platform.python_version(), "gpu": gpu}
    for package in ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy"):
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


def release_memory() -> None:
    """Give cached memory back to the device, and wait until the driver has cleared it.

    It clears what was freed at some 400 GB/s (on an H200) beside whatever runs next, which takes a
    tenth longer until that is done. The wait is for a slower clearing, to be safe.
    """
    gc.collect()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((reserved - torch.cuda.memory_reserved()) / 250e9)


def synchronises(run: Callable[[], Any]) -> bool:
    """Whether a call waits for the device, which a CUDA graph cannot capture."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def graph_times(run: Callable[[], Any], calls: int, repeats: int) -> list[float]:
    """Milliseconds of one call, from each of `repeats` replays of a CUDA graph of `calls` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # whatever is made once for a stream is not captured
    torch.cuda.current_stream().wait_stream(stream)
    release_memory()  # a capture does so, and does not wait
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # replays are queued before the first one starts
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / calls for a, b in itertools.pairwise(events)]


def device_time(run: Callable[[], Any]) -> dict[str, Any]:
    """Median and quartiles of the device's milliseconds for a call that has run before.

    By graph replay; by events around eager calls, and said so, where the call cannot be captured.
    Short calls are repeated within a graph, long ones are replayed fewer times.
    """
    waits = synchronises(run)
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    estimate = (time.perf_counter() - start) * 1e3
    calls = 10 if estimate < 1 else 1
    repeats = round(min(30, max(5, 100 / (calls * estimate))))
    method = "events"
    if not waits:
        try:
            times = graph_times(run, calls, repeats)
            method = "graph"
        except RuntimeError:
            traceback.print_exc()
    if method == "events":
        times = device_times(run, repeats, warmup=1)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"ms": median, "low ms": low, "high ms": high, "repeats": repeats, "method": method}


def host_microseconds(run: Callable[[], Any]) -> float:
    """Time the host spends in one call, the device being idle when it begins."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


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
