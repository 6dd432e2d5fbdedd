"""Float8 linears beside bfloat16 and torchao on one GPU: python -m benchmarks.float8

The model has the shapes of Llama-3-8B, random weights, bf16 parameters and bf16 AdamW states. On a
GPU of 80 GB it has 16 layers instead of 32. Each row runs in its own process. The time is the
median of the steps, and the memory is the peak of allocated bytes. --profile lists the kernels of
one block, forward and backward; --casts times casts and products of the block's sizes. torchao's
rows compile each block, as its documentation asks for. --tiny runs everything on a small model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, table, write

BF16, TORCHAO = "bfloat16", "torchao tensorwise, compiled blocks"
COMPILED = "bfloat16, compiled blocks"
RECIPES = ("tensorwise", "rowwise")
ROWS = (BF16, *RECIPES, COMPILED, TORCHAO)
WORKLOADS = ((1, 8192), (16, 512))
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
# Parts of kernels' names -> what the kernels compute. The first that fits counts.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn", "attention"),
    "casts": ("float8_cast", "absolute_maximum"),
    "products": ("gemm", "nvjet", "cutlass", "scaled_mm", "addmm", "::mm", "linear"),
    "norms, rope, activation": ("rms_norm", "rope", "glu", "column_sums"),
}


def build(row: str, layers: int, device: str, tiny: bool) -> Any:
    """Return a random model, built on the device, whose linears compute as the row says."""
    from ligermodels import LigerLlama, LlamaConfig, float8

    changes: dict[str, Any] = TINY if tiny else {}
    config = LlamaConfig.preset("llama-3-8b", num_hidden_layers=layers, **changes)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LigerLlama(config).train()
    finally:
        torch.set_default_dtype(torch.float32)
    if row in RECIPES:
        float8.convert(model, row, filter=(lambda name, linear: True) if tiny else None)
        print(model.kernels()["linear"], file=sys.stderr)
    elif row == TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model.layers, config=config)
    if row in (COMPILED, TORCHAO):
        for layer in model.layers:
            layer.compile()
    return model


def step_row(
    row: str, batch: int, seq: int, layers: int, steps: int, device: str, tiny: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    gpu = device == "cuda"
    model = build(row, layers, device, tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    vocab = model.head.vocab_size
    times, losses = [], []
    for step in range(steps + 3):
        ids = torch.randint(0, vocab, (batch, seq), device=device)
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if gpu:
            torch.cuda.synchronize()
        if step >= 3:
            times.append((time.perf_counter() - start) * 1e3)
        elif step == 2 and gpu:
            torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(times)
    return {
        "row": row,
        "batch x seq": f"{batch} x {seq}",
        "layers": layers,
        "ms": ms,
        "ms spread": max(times) - min(times),
        "tokens/s": round(batch * seq / ms * 1e3),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0,
        "last loss": losses[-1],
    }


def profile_row(row: str, batch: int, seq: int, device: str, tiny: bool) -> list[dict[str, Any]]:
    """Return the kernels of one block, forward and backward, and the sums of their kinds."""
    from torch.profiler import ProfilerActivity, profile

    from ligermodels.layers import AttentionContext

    model = build(row, 1, device, tiny)
    hidden = model.config.hidden_size
    x, residual, upstream = (
        torch.randn(batch, seq, hidden, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    cos, sin = model.rotary_emb(torch.arange(seq, device=device)[None])
    leaves = [each.requires_grad_() for each in (x, residual)]

    def run() -> None:
        out, total = model.layers[0](*leaves, AttentionContext(cos, sin))
        torch.autograd.backward((out, total), (upstream, upstream))
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        run()
    gpu = device == "cuda"
    repeats = 5 if gpu else 1
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(repeats):
            run()
        if gpu:
            torch.cuda.synchronize()
    rows = []
    for event in profiled.key_averages():
        ms = (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3 / repeats
        if ms > 0.001:
            name = event.key.lower()
            kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "rest")
            calls = event.count / repeats
            rows.append({"row": row, "kind": kind, "kernel": event.key, "calls": calls, "ms": ms})
    return sorted(rows, key=lambda each: -each["ms"])


def kind_sums(kernels: list[dict[str, Any]], rows: list[str]) -> list[dict[str, Any]]:
    """Return the milliseconds of each kind of kernels, one row for each implementation."""
    kinds = [*KINDS, "rest"]
    sums = []
    for row in rows:
        mine = [each for each in kernels if each["row"] == row]
        parts = {k: sum(each["ms"] for each in mine if each["kind"] == k) for k in kinds}
        sums.append({"one block": row, **parts, "all": sum(parts.values())})
    return sums


def casts(tokens: int, tiny: bool) -> list[dict[str, Any]]:
    """Return the times of the casts and products of a block's sizes."""
    from benchmarks.common import device_time
    from ligermodels.kernels.float8_cast import (
        absolute_maximum,
        float8_cast,
        float8_product,
        formats,
    )

    e4m3, _ = formats()
    h, f = (64, 128) if tiny else (4096, 14336)
    device = "cpu" if tiny else "cuda"

    def timed(run: Any) -> float:
        run()
        if not tiny:
            return device_time(run)["ms"]
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    found = []
    for rows, columns in ((tokens, h), (tokens, f), (tokens, 2 * f), (2 * f, h)):
        x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
        amax = absolute_maximum(x)
        ways: dict[str, tuple[int, Any]] = {
            "amax": (2, lambda x=x: absolute_maximum(x)),
            "amax of rows": (2, lambda x=x: absolute_maximum(x, "rows")),
            "amax of columns": (2, lambda x=x: absolute_maximum(x, "columns")),
            "straight": (3, lambda x=x, a=amax: float8_cast(x, a, e4m3)),
            "transposed": (
                3,
                lambda x=x, a=amax: float8_cast(x, a, e4m3, straight=False, transposed=True),
            ),
            "both": (4, lambda x=x, a=amax: float8_cast(x, a, e4m3, transposed=True)),
        }
        for name, (size, run) in ways.items():
            ms = timed(run)
            rate = size * x.numel() / ms / 1e6
            found.append({"size": f"{rows} x {columns}", "op": name, "ms": ms, "rate": rate})
    for out, width in ((6144, h), (h, h), (2 * f, h), (h, f)):
        out = 96 if tiny and out == 6144 else out
        x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        weight = torch.randn(out, width, device=device, dtype=torch.bfloat16)
        flops = 2 * tokens * out * width
        size = f"{tokens} x {width} x {out}"
        products = {"bf16": timed(lambda x=x, w=weight: x @ w.t())}
        for axis in ("tensor", "rows"):
            a, _ = float8_cast(x, absolute_maximum(x, axis), e4m3)
            b, _ = float8_cast(weight, absolute_maximum(weight, axis), e4m3)
            for fast in (True, False):
                name = f"float8, one scale a {axis.rstrip('s')}, {'fast' if fast else 'exact'} sums"
                products[name] = timed(
                    lambda a=a, b=b, fast=fast: float8_product(a, b, torch.bfloat16, fast=fast)
                )
        for name, ms in products.items():
            found.append({"size": size, "op": name, "ms": ms, "rate": flops / ms / 1e9})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for float8.json")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, help="by default what fits, 16 or 32")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--no-steps", action="store_true", help="leave out the training steps")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--casts", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--only", nargs=3, metavar=("ROW", "BATCH", "SEQ"))
    arguments = parser.parse_args()
    tiny = arguments.tiny
    device = "cpu" if tiny else "cuda"
    layers = arguments.layers
    if layers is None:
        large = not tiny and torch.cuda.get_device_properties(0).total_memory > 100 * 2**30
        layers = 2 if tiny else 32 if large else 16
    if arguments.only:
        row, batch, seq = arguments.only[0], *map(int, arguments.only[1:])
        if arguments.profile:
            print(json.dumps(profile_row(row, batch, seq, device, tiny)))
        else:
            made = step_row(row, batch, seq, layers, arguments.steps, device, tiny)
            print(json.dumps(made))
        return
    workloads = ((1, 32), (2, 16)) if tiny else WORKLOADS
    command = [sys.executable, "-m", "benchmarks.float8", "--steps", str(arguments.steps)]
    command += ["--layers", str(layers), *(["--tiny"] if tiny else [])]

    def other_process(*words: str) -> Any:
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        print(done.stderr[-1500 if done.returncode else -200 :], file=sys.stderr)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None

    result: dict[str, Any] = {"environment": environment(), "steps": [], "kernels": []}
    if not arguments.no_steps:
        for batch, seq in workloads:
            for row in arguments.rows:
                made = other_process("--only", row, str(batch), str(seq))
                result["steps"].append(
                    made or {"row": row, "batch x seq": f"{batch} x {seq}", "ms": "failed"}
                )
                print(result["steps"][-1], flush=True)
                write("float8.json", result, arguments.out)
    if arguments.profile:
        batch, seq = workloads[0]
        for row in arguments.rows:
            words = ("--profile", "--only", row, str(batch), str(seq))
            result["kernels"] += other_process(*words) or []
    if arguments.casts:
        result["casts"] = casts(64 if tiny else 8192, tiny)
    write("float8.json", result, arguments.out)
    if arguments.casts:
        print(table(result["casts"], ["size", "op", "ms", "rate"]))
    for row in arguments.rows:
        kernels = [each for each in result["kernels"] if each["row"] == row][:24]
        if kernels:
            shown = [each | {"kernel": each["kernel"][:60]} for each in kernels]
            print(table(shown, ["row", "kind", "kernel", "calls", "ms"]))
    print(result["environment"])
    if result["kernels"]:
        sums = kind_sums(result["kernels"], arguments.rows)
        print(table(sums, list(sums[0])))
    columns = ["batch x seq", "row", "layers", "ms", "ms spread", "tokens/s", "peak GiB"]
    if result["steps"]:
        print(table(result["steps"], [*columns, "last loss"]))


if __name__ == "__main__":
    main()
