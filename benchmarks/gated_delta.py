"""Measure the gated delta rule: python -m benchmarks.gated_delta [--only NAME] [--out FOLDER]

The op, the gate of its output and the whole layer at the shape of Qwen3.5-9B and
35B-A3B (16 key heads and 32 value heads of 128), beside fla and transformers where they run, in
bf16 on one GPU; and the error of each implementation of the op against the recurrence in float64,
beside those of rounding and of the recurrence in bf16, where every result of PyTorch is rounded.
TFLOP/s count the products of the chunk form for each token, value head and column, without the
inverse of a chunk: those of 64 tokens, 4 in forward and 10 in backward, and those of 128 columns of
a state, 3 and 8. For each kernel of the op there is its floor: the larger one of the times that its
bytes and its products take at the peaks of this H100 or H200. The share of the op is that of the
sum of these floors, also for the others. With --only, one implementation is measured, in a process
of its own. The script writes gated_delta.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases.base import Random, peer
from benchmarks.cases.gated_delta import OPS, qwen
from benchmarks.common import (
    device_time,
    environment,
    peak_bytes,
    release_memory,
    table,
    version,
    write,
)
from ligermodels.kernels.gated_delta_decode import gated_delta_decode
from ligermodels.layers import GatedDeltaNet

CHUNK, HEADS, DIM = 64, 32, 128
# Per second: of the memory of an H200 or an H100, and of products of 16-bit operands on both.
IS_H200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
PEAK_BYTES, PEAK_FLOP = 4.8e12 if IS_H200 else 3.35e12, 989e12
REPEATS = 10
OPS_AND_NAMES = {
    "gated_delta": ("ligermodels", "transformers", "fla"),
    "output_gate": ("ligermodels", "torch.compile"),
}
RESULTS = ("out", "q", "k", "v", "g", "beta")
COLUMNS = (
    "op, batch x seq, implementation, forward ms, forward TFLOP/s, forward share, both ms, "
    "both TFLOP/s, both share, peak MiB, error"
)


def measure(
    row: dict[str, Any],
    run: Callable[..., Any],
    leaves: list[Tensor],
    most: dict[str, tuple[float, float]],
) -> dict[str, Any]:
    """Return the row with the times of run(*leaves), forward alone and with backward.

    Args: most: the FLOP and the floor in us of "forward" and "both"; nothing if they are not known.
    """

    def both() -> tuple[Tensor, ...]:
        outputs = run(*leaves)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])

    try:
        with torch.no_grad():
            run(*leaves)
            row["forward ms"] = device_time(lambda: run(*leaves))["ms"]
        row["peak MiB"] = peak_bytes(both) / 2**20
        row["both ms"] = device_time(both)["ms"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    for name, (flop, floor) in most.items():
        if ms := row.get(f"{name} ms"):
            row |= {f"{name} TFLOP/s": flop / ms / 1e9, f"{name} share": floor / ms / 1e3}
    release_memory()
    return row


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute the op token by token, in the dtype of v."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state = torch.zeros(*v.shape[::2], k.shape[3], v.shape[3], dtype=v.dtype, device=v.device)
    outs = []
    for i in range(v.shape[1]):
        state = state * g[:, i, :, None, None].exp().to(state.dtype)
        old = (k[:, i, :, None] @ state)[..., 0, :]
        change = beta[:, i, :, None] * (v[:, i] - old)
        state = state + k[:, i, :, :, None] * change[..., None, :]
        outs.append((q[:, i, :, None] @ state)[..., 0, :])
    return torch.stack(outs, 1) * k.shape[-1] ** -0.5


def errors(implementations: dict[str, Callable[..., Tensor]]) -> list[dict[str, Any]]:
    """Return the relative error of outputs and gradients at 4097 tokens and few heads."""
    leaves = OPS["gated_delta"].build(Random(), 1, 4097, 1, 2, DIM).inputs()
    upstream = Random().normal(*leaves[2].shape).detach()

    def results(run: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        out = run(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out))]

    exact = results(recurrence, [x.detach().double().requires_grad_() for x in leaves])
    rows: list[dict[str, Any]] = []
    rounded = [x.to(y.dtype) for x, y in zip(exact, [leaves[2], *leaves], strict=True)]
    runs = {"rounding": None, "recurrence in bf16": recurrence, **implementations}
    for name, run in runs.items():
        try:
            found = rounded if run is None else results(run, leaves)
        except Exception as error:
            rows.append({"implementation": name, "error": str(error)[:100]})
            continue
        row: dict[str, Any] = {"implementation": name}
        for each, ours, theirs in zip(RESULTS, found, exact, strict=True):
            row[each] = float((ours.double() - theirs).norm() / theirs.norm())
        rows.append(row)
    return rows


def on_cpu(seq: int = 1024, heads: int = 4) -> list[dict[str, Any]]:
    """Return CPU times of the reference and of the recurrence, and the bytes kept for backward.

    They are those of one thread, so that other programs do not count.
    """
    torch.set_num_threads(1)
    case = OPS["gated_delta"].build(Random("cpu", torch.float32), 1, seq, heads // 2, heads, DIM)
    leaves, rows = case.inputs(), []
    runs = {"chunks": case.implementation("ligermodels").function, "recurrence": recurrence}
    for name, run in runs.items():
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        times = []
        for _ in range(3):
            start = time.process_time()
            with torch.no_grad():
                run(*leaves)
            between = time.process_time()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = run(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            times.append((between - start, time.process_time() - between))
        row: dict[str, Any] = {"implementation": name, "tokens": seq, "value heads": heads}
        row["kept MiB"] = sum(kept.values()) / 2**20
        row["forward ms"], row["both ms"] = (1e3 * min(x) for x in zip(*times, strict=True))
        rows.append(row)
        print(row, flush=True)
    return rows


def floors(batch: int, seq: int, key_bytes: float, value_bytes: float) -> dict[str, list[float]]:
    """Return the us of the floor of each kernel, in the order of its calls in a step.

    Bytes are those of a tensor that is read or written once, products those of two 16-bit operands.
    TF32 has half of their speed, and a product with an operand of two parts is two products.

    Args: key_bytes and value_bytes are those of q, or k, and of v.
    """
    slots = batch * -(-seq // CHUNK) * HEADS
    square, wide, state = CHUNK * CHUNK, CHUNK * DIM, DIM * DIM
    pairs, states = square * DIM, wide * DIM  # multiplications of the two kinds of products

    def floor(nbytes: float, of_slot: float, products: float) -> float:
        """Return microseconds. The last two are bytes and multiplications of a slot."""
        moved, multiplied = nbytes + slots * of_slot, slots * products
        return 1e6 * max(moved / PEAK_BYTES, 2 * multiplied / PEAK_FLOP)

    keys, values = key_bytes, value_bytes
    gates = 2 * CHUNK * 4
    # Of a slot: T in 2 bytes, P in 4, and T' in 2; E and u in 4, a state in 2.
    inverse = 2 * CHUNK**3
    return {
        "chunk": [
            floor(2 * keys, gates + 6 * square, 2 * pairs + 4 * inverse),
            floor(2 * keys, gates + 8 * square, 2 * pairs + 5 * inverse),
        ],
        "forward": [
            floor(2 * keys + 2 * values, gates + 6 * square, 3 * states + 3 * pairs),
            floor(keys + values, gates + 2 * square + 4 * wide + 2 * state, 2 * states + pairs),
        ],
        "backward": [
            floor(
                2 * keys + values, gates + 6 * square + 4 * wide + 2 * state, 3 * states + 3 * pairs
            )
        ],
        "gradients": [
            floor(3 * keys + 3 * values, gates + 8 * wide + 4 * state, 3 * states + 7 * pairs),
            floor(3 * keys + values, gates + 4 * wide + 2 * state, states + 5 * pairs),
        ],
    }


def most(batch: int, seq: int, leaves: list[Tensor]) -> dict[str, tuple[float, float]]:
    """Return the FLOP and the floor of the op, as `measure` takes them."""
    kernels = floors(batch, seq, leaves[0].nbytes, leaves[2].nbytes)
    per_column = 2.0 * batch * seq * HEADS * DIM
    return {
        "forward": (
            per_column * (4 * CHUNK + 3 * DIM),
            kernels["chunk"][0] + kernels["forward"][0],
        ),
        "both": (per_column * (14 * CHUNK + 11 * DIM), sum(map(sum, kernels.values()))),
    }


def kernel_rows(batch: int, seq: int) -> list[dict[str, Any]]:
    """Return the us of each kernel of the op in forward and backward, beside its floor."""
    case = OPS["gated_delta"].build(Random(), batch, seq, HEADS // 2, HEADS, DIM)
    leaves, function = case.inputs(), case.implementation("ligermodels").function

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, torch.ones_like(leaves[2]))

    both()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPEATS):
            both()
        torch.cuda.synchronize()
    least = floors(batch, seq, leaves[0].nbytes, leaves[2].nbytes)
    rows = []
    launches = sorted(found.events(), key=lambda event: event.time_range.start)
    for name, calls in least.items():
        events = [e for e in launches if e.name == f"gated_delta_{name}_kernel"]
        for i, floor in enumerate(calls):
            times = [e.device_time_total for e in events[i :: len(calls)]]
            us = statistics.median(times)
            row = {"batch x seq": f"{batch} x {seq}", "kernel": name, "call": i + 1}
            rows.append({**row, "us": us, "floor us": floor, "share": floor / us})
    return rows


def decode_rows() -> list[dict[str, Any]]:
    """Return the us of a generated token for several rows, beside the time of its bytes."""
    rows = []
    for batch in (1, 16, 64):
        random, channels = Random(), 2 * HEADS * DIM
        tokens = random.normal(batch, 1, channels + HEADS * (DIM + 2)).detach()
        shapes = (channels, 4), (HEADS,), (HEADS,), (DIM,)
        weights = tuple(random.normal(*shape).detach() for shape in shapes)
        state = tokens.new_zeros(batch, HEADS, DIM, DIM, dtype=torch.float32)
        memory = random.normal(batch, 3, channels).detach(), state
        run = partial(gated_delta_decode, tokens, weights, memory, HEADS // 2, DIM)
        run()
        us = 1e3 * device_time(run)["ms"]
        floor = 1e6 * sum(2 * x.nbytes for x in (tokens, *memory)) / PEAK_BYTES
        rows.append({"rows": batch, "us": us, "floor us": floor, "share": floor / us})
        print(rows[-1], flush=True)
    return rows


def layers() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Return the layer of Qwen3.5-9B, ours and transformers', with the tensors of its gradients."""
    with torch.device("cuda"):
        ours = GatedDeltaNet(4096, 16, HEADS, DIM, DIM, dtype=torch.bfloat16)
    made: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
        "ligermodels": (lambda x, *_: ours(x)[0], list(ours.parameters()))
    }
    config = peer("transformers.models.qwen3_5.configuration_qwen3_5")
    try:
        with torch.device("cuda"):
            theirs = qwen.Qwen3_5GatedDeltaNet(config.Qwen3_5TextConfig(), 0).bfloat16()
    except Exception as error:
        print(error)
    else:
        made["transformers"] = lambda x, *_: theirs(x), list(theirs.parameters())
    return made


def runs(batch: int, seq: int) -> Iterator[tuple[Any, ...]]:
    """Give op, implementation, function, and what makes its inputs."""
    for op, names in OPS_AND_NAMES.items():
        sizes = (batch, seq, HEADS // 2, HEADS, DIM)
        if op == "output_gate":
            sizes = (batch * seq, HEADS, DIM, True)
        case = OPS[op].build(Random(), *sizes)
        for name in names:
            yield op, name, case.implementation(name).function, case.inputs
    for name, (run, weights) in layers().items():
        x = partial(Random().normal, batch, seq, 4096)
        yield "layer", name, run, lambda x=x, w=weights: [x(), *w]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=OPS_AND_NAMES["gated_delta"], help="an implementation")
    parser.add_argument("--out", type=Path, help="folder for gated_delta.json")
    parser.add_argument("--cpu", action="store_true", help="chunks and the recurrence, on a CPU")
    arguments = parser.parse_args()
    if arguments.cpu:
        content: dict[str, Any] = {
            "environment": environment() | {"threads": "1", "time": "of the CPU"}
        }
        content["rows"] = on_cpu()
        write("gated_delta_cpu.json", content, arguments.out)
        return
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    names = [arguments.only] if arguments.only else OPS_AND_NAMES["gated_delta"]
    small = OPS["gated_delta"].build(Random(), 1, 4097, 1, 2, DIM).implementations
    rows: list[dict[str, Any]] = []
    versions = environment() | {"fla-core": version("fla-core")}
    content = {"environment": versions, "rows": rows}
    if "ligermodels" in names:
        content["kernels"] = kernel_rows(1, 8192) + kernel_rows(8, 2048)
        columns = ["batch x seq", "kernel", "call", "us", "floor us", "share"]
        print(table(content["kernels"], columns))
        content["decoding"] = decode_rows()
    found = [(size, *run) for size in ((1, 8192), (8, 2048)) for run in runs(*size)]
    order = ["gated_delta", "layer", *OPS_AND_NAMES]
    for (batch, seq), op, name, run, inputs in sorted(found, key=lambda x: order.index(x[1])):
        if name not in names and arguments.only:
            continue
        row = {"op": op, "batch x seq": f"{batch} x {seq}", "implementation": name}
        leaves = inputs()
        known = most(batch, seq, leaves) if op == "gated_delta" else {}
        rows.append(measure(row, run, leaves, known))
        write("gated_delta.json", content, arguments.out)
        print(rows[-1], flush=True)
    content["errors"] = errors({name: small[name] for name in names})
    print(table(content["errors"], ["implementation", *RESULTS, "error"]))
    write("gated_delta.json", content, arguments.out)
    print(table(rows, COLUMNS.split(", ")))


if __name__ == "__main__":
    main()
