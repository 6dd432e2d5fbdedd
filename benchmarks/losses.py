"""Measure losses beyond the next token: python -m benchmarks.losses [--out FOLDER] [--only ...]

At the heads of Llama-3-8B and Gemma-2-9B it measures DPO, GRPO, the Jensen-Shannon divergence from
a teacher and four Medusa heads, beside Liger's fused losses, TRL's kernels, eager PyTorch and
torch.compile; and linear CE. Each loss runs in its own process. For each size it prints time, peak
and scratch memory, and the share of the matrix products, and writes losses.json.
"""

import argparse
import contextlib
import importlib
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, Implementation, Random
from benchmarks.cases.token_losses import LOSSES, OURS, PRODUCTS
from benchmarks.common import (
    RESULTS,
    device_times,
    environment,
    peak_bytes,
    release_memory,
    table,
    write,
)
from benchmarks.ops import Row, as_tuple, attempt, run_workers, storage_bytes, training_call

MODE = "forward + backward"
COLUMNS = ["loss", "rows", "vocab", "implementation", "ms", "of floor", "products"]
COLUMNS += ["peak GB", "scratch GB"]
# Names of the kernels that compute matrix products: cuBLAS's on Hopper and before it, CUTLASS's.
PRODUCT_KERNELS = ("nvjet", "gemm", "cutlass", "cublas", "splitk", "xmma")
WARM_MS = 300  # a GPU reaches its power limit, and its steady clock, after some 100 ms of products


def steady_time(run: Callable[[], Any]) -> dict[str, float]:
    """Return the median milliseconds of a call that has run before, on a GPU at a steady clock."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    estimate = 1e3 * (time.perf_counter() - start)
    warmup, repeats = math.ceil(WARM_MS / estimate), 5 if estimate < WARM_MS else 3
    times = device_times(run, repeats, warmup)
    return {"ms": statistics.median(times), "low ms": min(times), "high ms": max(times)}


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that takes longer, at its next line of Python."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(implementation: Implementation, random: Random, profiled: bool, limit: float) -> Row:
    """Measure forward + backward within `limit` seconds; with `profiled`, also each kernel."""
    with time_limit(limit):
        run, inputs, upstream = training_call(implementation, random)
        made = storage_bytes(as_tuple(run()))
        for address in storage_bytes(inputs + upstream):
            made.pop(address, None)
        peak = peak_bytes(run)
        row: Row = steady_time(run)
        row |= {"peak GB": peak / 1e9, "scratch GB": max(0, peak - sum(made.values())) / 1e9}
        if profiled:
            row["kernels"] = kernel_times(run)
            row["products"] = product_share(row["kernels"])
        return {MODE: row}


def kernel_times(run: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of each kernel, copy and fill in one call, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us() / 1e3
    return dict(times.most_common())


def product_share(kernels: dict[str, float]) -> float:
    """Return the share of the kernels' time that matrix products take."""
    products = sum(
        ms for name, ms in kernels.items() if any(part in name.lower() for part in PRODUCT_KERNELS)
    )
    return products / max(sum(kernels.values()), 1e-9)


def floor_ms(random: Random, case: Case, counts: tuple[int, int, int]) -> float:
    """Return the milliseconds of a loss's matrix products alone, at a steady clock.

    Args: counts, how often it computes logits, the gradient of hidden and the gradient of weight.
    """
    assert case.products is not None
    rows, width, vocab = case.products
    with torch.no_grad():
        hidden, weight = random.normal(rows, width), random.normal(vocab, width)
        logits, of_hidden, of_weight = random.normal(rows, vocab), hidden.clone(), weight.clone()

        def run() -> None:
            for _ in range(counts[0]):
                torch.mm(hidden, weight.t(), out=logits)
            for _ in range(counts[1]):
                torch.mm(logits, weight, out=of_hidden)
            for _ in range(counts[2]):
                torch.mm(logits.t(), hidden, out=of_weight)

        run()
        return steady_time(run)["ms"]


def measure_loss(loss: str, indices: list[int], part: Path, arguments: argparse.Namespace) -> None:
    """Measure a loss at some sizes, ours first; rewrite the file after each implementation."""
    entry, rows = LOSSES[loss], []
    for index in indices:
        size = entry.small if arguments.small else entry.sweep[index]
        random = Random()
        case = entry.build(random, **size)
        floor = floor_ms(random, case, PRODUCTS.get(loss, (1, 1, 1)))
        release_memory()
        names = sorted(case.implementations, key=lambda name: name not in OURS)
        for name in names:
            if name in arguments.without or (index in arguments.alone and name not in OURS):
                continue
            take = partial(
                measure, case.implementation(name), random, name in OURS, arguments.limit
            )
            row = attempt({"op": loss, "sizes": size, "implementation": name}, take)
            if MODE in row:
                row[MODE] |= {"floor ms": floor, "of floor": floor / row[MODE]["ms"]}
            rows.append(row)
            print(table([shown(row)], COLUMNS).splitlines()[-1], flush=True)
            part.write_text(json.dumps({"rows": rows}))
            torch._dynamo.reset()
        del case


def replaced(earlier: list[Row], rows: list[Row]) -> list[Row]:
    """Return the rows, after those of an earlier run that were not measured again."""

    def key(row: Row) -> tuple[Any, ...]:
        return row["op"], row["implementation"], str(row["sizes"])

    again = {*map(key, rows)}
    return [row for row in earlier if key(row) not in again] + rows


def shown(row: Row) -> dict[str, Any]:
    """Return the cells of a row for the table that is printed."""
    cells = {"loss": row["op"], "implementation": row["implementation"], **row["sizes"]}
    return cells | row.get(MODE, {"ms": row.get("error", "")})


def loss_table(rows: list[Row], size: str) -> str:
    """Return the Markdown table of a size: a line for each implementation, a column for each loss.

    A cell has milliseconds, GB of scratch memory and, where it is known, the products' share of the
    time. An asterisk marks an implementation that leaves out the soft cap.
    """
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if size_of(row) != size:
            continue
        name, _, rest = row["implementation"].partition("without the cap")
        name = (name + rest).replace("()", "").replace(" )", ")").strip()
        if MODE in row:
            figures = row[MODE]
            products = f", {figures['products']:.0%}" if "products" in figures else ""
            cell = f"{significant(figures['ms'])}, {significant(figures['scratch GB'])}{products}"
        else:
            cell = row["error"]
        capped = name == row["implementation"]
        lines.setdefault(name, {"implementation": name})[row["op"]] = (
            cell if capped else f"{cell} *"
        )
    peers_first = sorted(lines.values(), key=lambda line: line["implementation"] in OURS)
    measured = {row["op"] for row in rows}
    return table(peers_first, ["implementation", *(loss for loss in LOSSES if loss in measured)])


def size_of(row: Row) -> str:
    sizes = row["sizes"]
    return f"{sizes['rows']} x {sizes['width']} x {sizes['vocab']}"


def significant(value: float) -> str:
    """Return a positive number with three digits, and no exponent."""
    return f"{float(f'{value:.3g}'):.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="LOSS")
    parser.add_argument("--sizes", nargs="+", type=int, help="numbers of the sizes, from 0")
    parser.add_argument("--small", action="store_true", help="one small size, to try it out")
    parser.add_argument("--without", nargs="+", default=[], help="implementations to leave out")
    parser.add_argument(
        "--alone", nargs="+", type=int, default=[], help="sizes where only ours is measured"
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds for an implementation")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a loss")
    parser.add_argument(
        "--again",
        action="store_true",
        help="update the losses.json in --out, which must come from the same GPU and versions",
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    count = 1 if arguments.small else len(LOSSES[arguments.only[0]].sweep)
    if arguments.worker:
        importlib.import_module("torch._inductor.compile_fx")  # while another process measures
        sys.stdin.readline()
        indices = arguments.sizes or [*range(count)]
        measure_loss(arguments.only[0], indices, arguments.worker, arguments)
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    command = [sys.executable, "-m", "benchmarks.losses", *sys.argv[1:]]
    rows: list[Row] = []
    earlier: list[Row] = []
    if arguments.again:
        found = json.loads((arguments.out / "losses.json").read_text())
        if found["environment"] != environment():
            parser.error(f"{arguments.out}/losses.json comes from {found['environment']}")
        earlier = found["rows"]
    with tempfile.TemporaryDirectory() as folder:
        parts = {loss: Path(folder) / f"{loss}.json" for loss in arguments.only}
        commands = {
            loss: [*command, "--only", loss, "--worker", str(part)] for loss, part in parts.items()
        }
        for _, result in run_workers(commands, parts, arguments.timeout):
            rows += result["rows"]
            content = {"environment": environment(), "rows": replaced(earlier, rows)}
            write("losses.json", content, arguments.out)
    print(table([shown(row) for row in rows], COLUMNS))
    for size in dict.fromkeys(map(size_of, rows)):
        print(
            f"\n{size}, ms and GB of scratch memory:\n{loss_table(replaced(earlier, rows), size)}"
        )


if __name__ == "__main__":
    main()
