"""Measure ops and peers: python -m benchmarks.ops [--out FOLDER] [--only OP ...] [--sizes all]

Each op runs in its own process, which also measures the ceilings for its times. If a process
crashes or takes too long, this is recorded and the next one starts. Host times come last, in a
process that has the host to itself. benchmarks/README.md explains what is measured and how.
benchmarks.plots draws the result, ops.json.
"""

import argparse
import dataclasses
import datetime
import gc
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import trange

from benchmarks import plots
from benchmarks.cases import OPS, Absent, Case, Implementation, Random
from benchmarks.common import (
    RESULTS,
    copy_bandwidth,
    device_time,
    environment,
    host_microseconds,
    peak_bytes,
    release_memory,
    write,
)

Row = dict[str, Any]
MODES = ("forward", "forward + backward")


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def differentiable(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [output for output in outputs if output.requires_grad]


def training_call(
    implementation: Implementation, random: Random
) -> tuple[Callable[[], tuple[Tensor, ...]], list[Tensor], list[Tensor]]:
    """Return a forward + backward call, its inputs and its upstream gradients.

    The call returns the outputs and the gradients. The upstream gradient is 1 for a scalar loss, as
    in training, and random for other outputs. Outputs without a gradient have none.
    """
    inputs = implementation.inputs()
    outputs = as_tuple(implementation.function(*inputs))
    upstream = [torch.ones_like(output) for output in differentiable(outputs)]
    for gradient in upstream:
        if gradient.dim():
            gradient.normal_(generator=random.generator)

    def run() -> tuple[Tensor, ...]:
        results = as_tuple(implementation.function(*inputs))
        return *results, *torch.autograd.grad(differentiable(results), inputs, upstream)

    return run, inputs, upstream


def storage_bytes(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by address. Several tensors may share one storage."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def measure_call(run: Callable[[], Any], held: list[Tensor]) -> Row:
    """Return the time of a call that has run before, the memory it adds, and its scratch memory.

    held: the tensors that exist before the call. A result in the storage of one of them was written
        in place or is a view, so it adds no memory.
    """
    made = storage_bytes(as_tuple(run()))
    for address in storage_bytes(held):
        made.pop(address, None)
    peak = peak_bytes(run)
    return {
        **device_time(run),
        "peak GB": peak / 1e9,
        "scratch GB": max(0, peak - sum(made.values())) / 1e9,
    }


def measure(implementation: Implementation, random: Random, forward_too: bool) -> Row:
    """Measure forward + backward and, if `forward_too`, forward alone, as in evaluation."""
    run, inputs, upstream = training_call(implementation, random)
    row = {"forward + backward": measure_call(run, inputs + upstream)}
    if forward_too:
        detached = [tensor.detach() for tensor in inputs]

        def forward() -> Any:
            with torch.no_grad():
                return implementation.function(*detached)

        forward()
        row["forward"] = measure_call(forward, detached)
    return row


# The implementations of an op alternate call by call, and the ops alternate round by round. Other
# work on the host, for a moment or for seconds, then affects all of them equally.
HOST_ROUNDS, HOST_TURNS = 60, 24


@dataclasses.dataclass
class HostCall:
    """A call of an implementation, and the microseconds of host time that each run took."""

    row: Row
    run: Callable[[], Any] | None = None
    times: list[float] = dataclasses.field(default_factory=list)

    def take(self) -> None:
        """Time one more call. If it fails, the row records the failure."""
        if self.run is None:
            return
        try:
            self.times.append(host_microseconds(self.run))
        except Exception as error:
            self.run, self.row = None, self.row | failure(error)

    def result(self) -> Row:
        """Return the row with the median and quartiles, or with the failure."""
        if self.run is None:
            return self.row
        low, median, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return self.row | {"host us": median, "host low us": low, "host high us": high}


def turns(calls: Sequence[HostCall], count: int, generator: torch.Generator) -> Iterator[HostCall]:
    """Yield each call once per turn, in random order, and never the same call twice in a row.

    A call that runs right after itself would find its code in the processor's caches.
    """
    last = None
    for _ in range(count):
        order = [calls[i] for i in torch.randperm(len(calls), generator=generator).tolist()]
        if order[0] is last:
            order.append(order.pop(0))
        yield from order
        last = order[-1]


def floors(
    case: Case, implementation: Implementation, bandwidth: float, products: Sequence[float]
) -> dict[str, float]:
    """Return the floor in milliseconds: the bytes at copy speed, or the matrix products alone."""
    if case.products:
        logits = products[0]
        return {
            "forward": logits,
            "forward + backward": case.forward_products * logits + products[1] + products[2],
        }
    assert implementation.bytes is not None
    forward, both = (1e3 * count / bandwidth for count in implementation.bytes)
    return {"forward": forward, "forward + backward": both}


def product_times(random: Random, rows: int, width: int, vocab: int) -> list[float]:
    """Return the milliseconds of a linear's three matrix products: output and both gradients."""
    with torch.no_grad():
        hidden, weight = random.normal(rows, width), random.normal(vocab, width)
        logits = random.normal(rows, vocab)
        times = []
        for a, b in ((hidden, weight.t()), (logits, weight), (logits.t(), hidden)):
            out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)

            def run(a: Tensor = a, b: Tensor = b, out: Tensor = out) -> None:
                torch.mm(a, b, out=out)

            run()
            times.append(device_time(run)["ms"])
    return times


def failure(error: Exception) -> Row:
    traceback.print_exc()
    return {"error": f"failed: {type(error).__name__}: {str(error)[:300]}"}


def attempt(row: Row, take: Callable[[], Row]) -> Row:
    """Return the row with what `take` measured, or with the reason why it failed."""
    try:
        return row | take()
    except (Absent, ImportError) as error:
        return row | {"error": f"absent: {error}"}
    except torch.cuda.OutOfMemoryError:
        return row | {"error": "out of memory"}
    except Exception as error:
        return row | failure(error)
    finally:
        release_memory()


def better(row: Row, earlier: Row | None) -> Row:
    """Merge two rows of one implementation; for each mode the shorter time counts."""
    if earlier is None or "error" in earlier:
        return row
    if "error" in row:
        return earlier
    times = {
        mode: min(row[mode], earlier[mode], key=lambda timing: timing["ms"])
        for mode in MODES
        if mode in row
    }
    return row | times


def measure_op(op: str, all_sizes: bool, part: Path) -> None:
    """Measure one op in this process, and rewrite the file `part` after every row."""
    entry = OPS[op]
    result: dict[str, Any] = {"copy GB/s": copy_bandwidth() / 1e9, "rows": []}

    points = entry.table + (entry.sweep if all_sizes else [])
    # The largest size comes last. If it crashes (an index beyond 32 bits), the others are done.
    for sizes in sorted(
        points, key=lambda sizes: math.prod(value or 1 for value in sizes.values())
    ):
        random = Random()
        case = entry.build(random, **sizes)
        products: list[float] = []
        if case.products:
            products = product_times(random, *case.products)
            release_memory()
        names, best, before = list(case.implementations), {}, result["rows"]
        for name in [n for turn in range(entry.rounds) for n in names[:: -1 if turn % 2 else 1]]:
            implementation = case.implementation(name)
            floor = floors(case, implementation, result["copy GB/s"] * 1e9, products)
            # Forward alone is shown for the table and for heads. Compiling it takes seconds.
            forward_too = sizes in entry.table or (products and name != "torch.compile")
            row = attempt(
                {"op": op, "sizes": sizes, "implementation": name},
                lambda i=implementation, r=random, f=forward_too: measure(i, r, f),
            )
            for mode, milliseconds in floor.items():
                if mode in row:
                    row[mode] |= {
                        "floor ms": milliseconds,
                        "share": milliseconds / row[mode]["ms"],
                    }
            print(progress(row), flush=True)
            best[name] = better(row, best.get(name))
            result["rows"] = [*before, *best.values()]
            part.write_text(json.dumps(result))
        del case, implementation
        torch._dynamo.reset()


def host_call(row: Row, implementation: Implementation, random: Random) -> HostCall:
    def prepare() -> Row:
        run, *_ = training_call(implementation, random)
        run()
        return {"run": run}

    row = attempt(row, prepare)
    return HostCall(row, row.pop("run", None))


def measure_host(ops: Sequence[str], part: Path) -> None:
    """Measure the host times of all ops, and rewrite the file `part` after every round."""
    random, generator = Random(), torch.Generator().manual_seed(0)
    calls: dict[str, list[HostCall]] = {}
    for op in ops:
        if OPS[op].host:
            sizes = OPS[op].small
            case = OPS[op].build(random, **sizes)
            row = {"op": op, "sizes": sizes, "host": True}
            calls[op] = [
                host_call(row | {"implementation": name}, case.implementation(name), random)
                for name in case.implementations
            ]
    for _ in trange(HOST_ROUNDS, desc="Host times", unit="round", disable=None):
        for of_op in calls.values():
            for call in turns(of_op, HOST_TURNS, generator):
                call.take()
        rows = [call.result() for of_op in calls.values() for call in of_op]
        part.write_text(json.dumps({"rows": rows}))
    for row in rows:
        print(progress(row), flush=True)


def progress(row: Row) -> str:
    sizes = " x ".join(str(value) for value in row["sizes"].values())
    text = f"  {row['op']} {sizes} {row['implementation']}:"
    if "error" in row:
        return f"{text} {row['error']}"
    if "host us" in row:
        return f"{text} {row['host us']:.0f} us of host time"
    for mode in MODES:
        if mode in row:
            timing = row[mode]
            text += f" {mode} {timing['ms']:.4g} ms ({timing['method']}, {timing['share']:.0%})"
    return f"{text}, scratch {row['forward + backward']['scratch GB']:.3g} GB"


def run_workers(
    commands: dict[str, list[str]], parts: dict[str, Path], timeout: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one process per op, and yield each op with what its process wrote, and its error, if any.

    The processes measure one after the other. Each waits for a line on its standard input before
    it uses the GPU, so that the next process can import its modules while this one measures.
    """

    def start(op: str) -> subprocess.Popen[str]:
        return subprocess.Popen(commands[op], stdin=subprocess.PIPE, text=True)

    def go(worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write("\n")
            worker.stdin.close()
        except BrokenPipeError:
            pass  # the process has ended already, and its status says why

    order = list(commands)
    waiting = start(order[0])
    worker = waiting
    try:
        for op, following in zip(order, [*order[1:], None]):
            worker = waiting
            began = time.perf_counter()
            print(f"{op}:", flush=True)
            go(worker)
            if following is not None:
                waiting = start(following)
            try:
                status = worker.wait(timeout)
                fault = f"its process ended with status {status}" if status else None
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                fault = f"stopped after {timeout:.0f} s"
            result = json.loads(parts[op].read_text()) if parts[op].exists() else {"rows": []}
            result["seconds"] = time.perf_counter() - began
            if fault:
                result["error"] = fault
            print(f"{op}: {fault or 'done'}, {result['seconds']:.0f} s", flush=True)
            yield op, result
    finally:
        for process in (worker, waiting):
            if process.poll() is None:
                process.kill()


def collect(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Merge the parts into one result; "ops" holds everything in them except the rows."""
    return {
        "environment": environment(),
        "ops": {
            op: {key: value for key, value in part.items() if key != "rows"}
            for op, part in results.items()
        },
        "rows": [row for part in results.values() for row in part["rows"]],
    }


def replaced(earlier: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier result, if any, with the rows replaced that were measured again."""
    if not earlier:
        return result

    def key(row: Row) -> tuple[Any, ...]:
        return row["op"], row["implementation"], str(row["sizes"]), row.get("host", False)

    again = {key(row) for row in result["rows"]}
    kept = [row for row in earlier["rows"] if key(row) not in again]
    return earlier | {"ops": earlier["ops"] | result["ops"], "rows": kept + result["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS), metavar="OP")
    parser.add_argument(
        "--sizes",
        choices=("table", "all"),
        default="table",
        help="table: the sizes of ops.md; all: also the sizes of the plots",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="update the ops.json in --out, which must come from the same GPU and versions",
    )
    parser.add_argument(
        "--host",
        choices=("with", "without", "alone"),
        default="with",
        help="measure with host times, without them, or host times alone",
    )
    parser.add_argument("--timeout", type=float, default=480, help="seconds an op may take")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    everything = arguments.sizes == "all"
    if arguments.worker:
        importlib.import_module(
            "torch._inductor.compile_fx"
        )  # the process before this one measures meanwhile
        gc.freeze()  # garbage collections between measurements then skip the modules
        sys.stdin.readline()
        if arguments.host == "alone":
            measure_host(arguments.only, arguments.worker)
        else:
            measure_op(arguments.only[0], everything, arguments.worker)
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on; benchmarks.plots works without a GPU")
    if arguments.host == "alone" and not arguments.again:
        parser.error("--host alone only updates an existing ops.json; add --again")
    earlier: dict[str, Any] = {}
    if arguments.again:
        earlier = json.loads((arguments.out / "ops.json").read_text())
        if earlier["environment"] != environment():
            parser.error(
                f"{arguments.out}/ops.json comes from another environment, "
                f"{earlier['environment']}; run again without --again"
            )
    ops = [op for op in arguments.only if OPS[op].table or everything]
    if not ops:
        parser.error(
            f"{' '.join(arguments.only)}: only the plots have sizes of this op; add --sizes all"
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ops", "--sizes", arguments.sizes]
        names = [] if arguments.host == "alone" else [*ops]
        names += ["host"] * (arguments.host != "without")
        parts = {name: Path(folder) / f"{name}.json" for name in names}
        commands = {op: [*command, "--only", op, "--worker", str(parts[op])] for op in names}
        if "host" in names:
            commands["host"] = [*command, "--only", *ops, "--host", "alone"]
            commands["host"] += ["--worker", str(parts["host"])]
        results: dict[str, Any] = {}
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "minutes")
        for name, part in run_workers(commands, parts, arguments.timeout):
            results[name] = part | {"run": started}
            result = replaced(earlier, collect(results))
            write("ops.json", result, arguments.out)
    plots.write_all(result, arguments.out)


if __name__ == "__main__":
    main()
