"""Measure the gated delta rule: python -m benchmarks.gated_delta [--out FOLDER]

The op, its inputs, the gate of its output and the whole layer at the shape of Qwen3.5-9B and
35B-A3B (16 key heads and 32 value heads of 128), beside fla and transformers where they run, in
bf16 on one GPU; and the error of each implementation of the op against the recurrence in float64.
TFLOP/s count the products of the chunk form, 5 * 64 + 6 * 128 multiplications for each token, value
head and column in forward, without the inverse of a chunk. The script writes gated_delta.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from ligermodels.layers import GatedDeltaNet

CHUNK, HEADS, DIM = 64, 32, 128
IMPLEMENTATIONS = ("ligermodels", "transformers", "fla")
RESULTS = ("out", "q", "k", "v", "g", "beta")
COLUMNS = "op, batch x seq, implementation, forward ms, both ms, TFLOP/s, peak MiB, error"


def measure(
    row: dict[str, Any], run: Callable[..., Any], leaves: list[Tensor], flop: float = 0.0
) -> dict[str, Any]:
    """Return the row with the times of run(*leaves), forward alone and with backward."""

    def both() -> tuple[Tensor, ...]:
        outputs = run(*leaves)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])

    try:
        with torch.no_grad():
            run(*leaves)
            row["forward ms"] = device_time(lambda: run(*leaves))["ms"]
        if flop:
            row["TFLOP/s"] = flop / row["forward ms"] / 1e9
        row["peak MiB"] = peak_bytes(both) / 2**20
        row["both ms"] = device_time(both)["ms"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    release_memory()
    return row


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute the op token by token."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state = torch.zeros(*v.shape[::2], k.shape[3], v.shape[3], dtype=v.dtype, device=v.device)
    outs = []
    for i in range(v.shape[1]):
        state = state * g[:, i, :, None, None].exp()
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
    for name, run in {"rounding": None, **implementations}.items():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for gated_delta.json")
    parser.add_argument(
        "--fla-anyway",
        action="store_true",
        help="time fla's backward with a Triton that it refuses on Hopper; see its error for why",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    if arguments.fla_anyway:
        peer("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    small = OPS["gated_delta"].build(Random(), 1, 4097, 1, 2, DIM).implementations
    rows: list[dict[str, Any]] = []
    versions = environment() | {"fla-core": version("fla-core")}
    content: dict[str, Any] = {"environment": versions, "rows": rows}
    content["errors"] = errors({name: small[name] for name in IMPLEMENTATIONS})
    print(table(content["errors"], ["implementation", *RESULTS, "error"]))
    for batch, seq in ((1, 8192), (8, 2048)):
        flop = 2.0 * batch * seq * HEADS * DIM * (5 * CHUNK + 6 * DIM)
        runs: list[tuple[Any, ...]] = []
        for op, names, count in (
            ("gated_delta", IMPLEMENTATIONS, flop),
            ("gated_delta_inputs", ("ligermodels", "torch.compile"), 0.0),
        ):
            case = OPS[op].build(Random(), batch, seq, HEADS // 2, HEADS, DIM)
            for name in names:
                runs.append((op, name, case.implementation(name).function, case.inputs, count))
        gate = OPS["output_gate"].build(Random(), batch * seq, HEADS, DIM, True)
        for name in ("ligermodels", "torch.compile"):
            runs.append(("output_gate", name, gate.implementation(name).function, gate.inputs, 0.0))
        for name, (run, weights) in layers().items():
            x = partial(Random().normal, batch, seq, 4096)
            runs.append(("layer", name, run, lambda x=x, w=weights: [x(), *w], 0.0))
        for op, name, run, inputs, count in runs:
            row = {"op": op, "batch x seq": f"{batch} x {seq}", "implementation": name}
            rows.append(measure(row, run, inputs(), count))
            write("gated_delta.json", content, arguments.out)
            print(rows[-1], flush=True)
    print(table(rows, COLUMNS.split(", ")))


if __name__ == "__main__":
    main()
