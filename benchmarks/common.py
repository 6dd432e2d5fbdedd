"""Helpers that the benchmarks share: timing, memory, and writing of results."""

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
    """Return the GPU and the versions of everything that is compared."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"python": platform.python_version(), "gpu": gpu}
    packages = "torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy"
    return versions | {package: version(package) for package in packages}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def device_times(run: Callable[[], Any], repeats: int = 20, warmup: int = 5) -> list[float]:
    """Return the milliseconds of `repeats` calls, each measured between two events."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device sleeps first, so that the host runs ahead and no launch is timed.
        torch.cuda._sleep(2_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def release_memory() -> None:
    """Give cached memory back to the device, and wait until the driver has cleared it.

    The driver clears freed memory at about 400 GB/s (on an H200) while the next kernels run, and
    these take a tenth longer until it is done. The wait assumes 250 GB/s, to be safe.
    """
    gc.collect()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    time.sleep((reserved - torch.cuda.memory_reserved()) / 250e9)


def synchronises(run: Callable[[], Any]) -> bool:
    """Whether a call waits for the device. A CUDA graph cannot capture such a call."""
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
    """Return the milliseconds of one call, for each of `repeats` replays of a graph of `calls`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what a stream allocates only once must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    release_memory()  # a capture also frees memory, but does not wait
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # all replays are queued before the first one starts
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / calls for a, b in itertools.pairwise(events)]


def device_time(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the median and the quartiles of the device's milliseconds for a call.

    The call must have run before. It is timed by replays of a CUDA graph, or by events around eager
    calls if it cannot be captured; "method" says which. A graph holds a short call several times,
    and a long call is replayed fewer times.
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
    """Return the microseconds that the host spends in one call. The device is idle at its start."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of memory during a call, without what was held before; results count."""
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
    """Return the bytes per second, read plus written, of a large copy: the bandwidth ceiling."""
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    milliseconds = statistics.median(device_times(lambda: target.copy_(source)))
    return 2 * source.nbytes / milliseconds * 1e3


def write(name: str, content: dict[str, Any], folder: Path | None = None) -> None:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Format rows as a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append(
            "| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    return "\n".join(lines)
