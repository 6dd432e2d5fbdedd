"""Float8 linears beside bfloat16 and torchao on one GPU: python -m benchmarks.float8

The model has the shapes of Llama-3-8B, random weights, bf16 parameters and bf16 AdamW states. On a
GPU of less than 75 GiB it has 16 layers instead of 32. Each row runs in its own process, or with
--together all in one, which starts faster. Rows with this library's linears train with its AdamW,
the others with PyTorch's; with --torch-adamw all do. The time is the median of the steps, and the
memory is the peak of allocated bytes. --profile lists the kernels of one block, forward and
backward, beside the time that their bytes or operations take at least; --step-profile those of a
training step; --gradients compares with float64's; --casts times casts and products of the block's
sizes. torchao's rows compile each block, as its documentation asks for, in this library's model and
in transformers' with Liger's loss. The rows "kept in float8" have the memory plan in which every
layer keeps gate and up in float8. --plans FOLDER also trains with plans for the budgets of PLANNED;
it reads them from the folder, or plans and writes them there. --tiny runs all on a small model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, release_memory, table, write

BF16, COMPILED = "bfloat16", "bfloat16, compiled blocks"
RECIPES = ("tensorwise", "delayed", "rowwise", "blocks")
IN_FLOAT8 = ", kept in float8"
KEPT = tuple(recipe + IN_FLOAT8 for recipe in RECIPES)
TORCHAO = tuple(f"torchao {recipe}" for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"))
HF_TORCHAO = tuple(f"transformers + liger loss + {row}" for row in TORCHAO)
ROWS = (BF16, *RECIPES, *KEPT, COMPILED, *TORCHAO, *HF_TORCHAO)
WORKLOADS = ((1, 8192), (16, 512))
# (batch, seq, whether there is an optimizer) -> GiB for a model of 16 or 32 layers. Each layer may
# keep about as much with both.
PLANNED = {
    (1, 8192, True): {16: 37, 32: 64},
    (8, 2048, True): {16: 36, 32: 62},
    (1, 32768, False): {16: 23, 32: 38},
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
PROFILES = {"--profile": "kernels", "--step-profile": "step_kernels"}
# Parts of kernels' names -> what the kernels compute. The first that fits counts.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn", "attention"),
    "casts": ("float8_cast", "absmax"),
    "loss": ("cross_entropy", "scaled_kernel"),
    "optimizer": ("adam", "multi_tensor"),
    "products": ("gemm", "nvjet", "cutlass", "scaled_mm", "addmm", "::mm", "linear"),
    "norms, rope, activation": ("norm_", "rope", "glu", "column_sums"),
}


def build(row: str, layers: int, device: str, tiny: bool) -> Any:
    """Return a random model, built on the device, whose linears compute as the row says."""
    from ligermodels import LayerPlan, LigerLlama, LlamaConfig, MemoryPlan, float8

    changes: dict[str, Any] = TINY if tiny else {}
    config = LlamaConfig.preset("llama-3-8b", num_hidden_layers=layers, **changes)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            if row in HF_TORCHAO:
                model = transformers_model(config).train()
            else:
                model = LigerLlama(config).train()
    finally:
        torch.set_default_dtype(torch.float32)
    blocks = model.model.layers if row in HF_TORCHAO else model.layers
    if row in (*RECIPES, *KEPT):
        recipe = row.removesuffix(IN_FLOAT8)
        float8.convert(model, recipe, filter=(lambda name, linear: True) if tiny else None)
        print(model.kernels()["linear"], file=sys.stderr)
        if row in KEPT:
            model.set_memory_plan(MemoryPlan.uniform(layers, LayerPlan(float8=True)))
    elif row in (*TORCHAO, *HF_TORCHAO):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(row.split()[-1])
        convert_to_float8_training(blocks, config=recipe)
    if row in (COMPILED, *TORCHAO, *HF_TORCHAO):
        for block in blocks:
            block.compile()
    return model


def transformers_model(config: Any) -> Any:
    """Return transformers' Llama of these shapes, whose loss is Liger's."""
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False)
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers head_dim num_attention_heads "
        "num_key_value_heads rms_norm_eps rope_theta max_position_embeddings"
    )
    values = {name: getattr(config, name) for name in names.split()}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, use_cache=False))


def step_row(
    row: str,
    batch: int,
    seq: int,
    layers: int,
    steps: int,
    device: str,
    tiny: bool,
    profile: bool = False,
    plans: Path | None = None,
    trains: bool = True,
    torch_adamw: bool = False,
) -> Any:
    """Return the row of the table, or with profile the kernels of a step and its time.

    Args: plans: the folder of the plans, if the row has one; trains: whether an optimizer steps.
    """
    from ligermodels import AdamW

    torch.manual_seed(0)
    gpu = device == "cuda"
    model = build(row, layers, device, tiny)
    planned = {}
    if plans is not None:
        gib = 1 if tiny else PLANNED[batch, seq, trains][layers]
        planned = {"budget GiB": gib, **set_plan(model, row, batch, seq, gib, trains, plans)}
    torch_adamw |= row not in (BF16, *RECIPES, *KEPT)
    optimizer: torch.optim.Optimizer
    if trains:
        make = partial(torch.optim.AdamW, fused=True) if torch_adamw else AdamW
        optimizer = make(model.parameters(), lr=1e-5)
    else:  # its steps let delayed scales move on
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    vocab, warm = model.config.vocab_size, 3 if plans is None else 2
    times, losses = [], []

    def train(ids: torch.Tensor) -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())

    for step in range(steps + warm):
        ids = torch.randint(0, vocab, (batch, seq), device=device)
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        train(ids)
        if gpu:
            torch.cuda.synchronize()
        if step >= warm:
            times.append((time.perf_counter() - start) * 1e3)
        elif step == warm - 1 and gpu:
            torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(times)
    if profile:
        kernels = kernel_times(lambda: train(ids), gpu, row)
        busy = sum(each["ms"] for each in kernels)
        return [*kernels, {"row": row, "kind": "idle", "kernel": "", "calls": 1, "ms": ms - busy}]
    return {
        "row": row,
        "batch x seq": f"{batch} x {seq}",
        "layers": layers,
        "AdamW": "torch" if torch_adamw else "ligermodels",
        "ms": ms,
        "ms spread": max(times) - min(times),
        "tokens/s": round(batch * seq / ms * 1e3),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0,
        "last loss": losses[-1],
        **planned,
    }


def set_plan(
    model: Any, row: str, batch: int, seq: int, gib: int, trains: bool, folder: Path
) -> dict[str, Any]:
    """Give a model the fastest plan for a budget; return what the plan says.

    The planner does not know torchao's linears: their blocks keep their inputs alone.
    """
    from ligermodels import LayerPlan, MemoryPlan

    if row in HF_TORCHAO:
        model.gradient_checkpointing_enable()
    elif row in TORCHAO:
        model.set_memory_plan(MemoryPlan.uniform(len(model.layers), LayerPlan("input")))
    if row in (*TORCHAO, *HF_TORCHAO):
        return {"layers keep": {"input": model.config.num_hidden_layers}}
    path = folder / f"{row}-{batch}x{seq}.json"
    if path.is_file():
        plan = MemoryPlan.from_dict(json.loads(path.read_text()))
    else:
        options = {} if trains else {"optimizer_bytes": 0}
        options |= {"count": "allocated", "reserve": 0.0, "device": "cuda"}
        plan = model.plan_memory(batch, seq, f"{gib}GiB", **options)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan.to_dict()))
    model.set_memory_plan(plan)
    assert plan.prediction is not None
    layers = Counter(map(str, plan.layers))
    return {"predicted GiB": plan.prediction.peak_bytes / 2**30, "layers keep": dict(layers)}


def profile_row(row: str, batch: int, seq: int, device: str, tiny: bool) -> list[dict[str, Any]]:
    """Return the kernels of one block, forward and backward."""
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
        torch.optim.SGD(model.layers.parameters(), lr=0.0).step()  # delayed scales move on
    kernels = kernel_times(run, device == "cuda", row)
    least = floors(row, batch * seq, seq, model.config)
    for each in kernels:
        each["floor"] = next((ms for name, ms in least.items() if name in each["kernel"]), "")
    for kind in ("products", "attention"):
        part = {"kernel": kind, "calls": 0, "ms": 0.0, "floor": least[kind]}
        kernels.append({"row": row, "kind": "floors", **part})
    return kernels


def floors(row: str, tokens: int, seq: int, config: Any) -> dict[str, float]:
    """Return by a kernel's name the milliseconds that one block's bytes or operations take.

    An H100 moves 3.0 TB/s in a copy, an H200 4.4 in an addition, and both multiply at most 1.98
    PFLOP/s in float8 and 0.99 in bfloat16.
    """
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    speed = 4.4e9 if "H200" in name else 3.0e9
    h, f = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * config.head_dim
    kept, row = row in KEPT, row.removesuffix(IN_FLOAT8)
    qkv, delayed, plain = h + 2 * kv, row == "delayed", row == BF16
    weights = h * qkv + h * h + 3 * h * f
    y, rows = 1 if delayed else 2, 2 if row == "rowwise" else 1
    per_token = {
        "norm_forward": 2 * (6 + y) * h,
        "norm_backward": 2 * 10 * h,
        "rope": 4 * (h + kv) + 4 * qkv,
        "CUDAFunctor_add": 2 * 6 * h,
        "glu_forward": (4 + y + 2 * kept) * f,
        "glu_backward": (10 - 2 * kept + (2 if plain or rows > 1 or row == "blocks" else 1)) * f,
    }
    # Each cast reads 16 bits and writes 8; gradients are written twice. With delayed scales, other
    # kernels write some of them.
    gradients, straight = qkv + 2 * h + 2 * f * (not delayed), h if delayed else 3 * h + f
    casts = tokens * (4 * gradients + 3 * straight + 3 * 3 * h) + 6 * weights
    if rows > 1 or row == "blocks":
        casts += 3 * tokens * f  # the activation, transposed
    maxima = {"tensorwise": tokens * 2 * (qkv + 3 * h) + 2 * weights}
    maxima["rowwise"] = 2 * (2 * tokens * (qkv + 5 * h + 3 * f + h) + 2 * weights)
    moved = {name: each * tokens for name, each in per_token.items()}
    moved |= {"float8_cast": casts, "AbsMax": maxima.get(row, 0)}
    flops = 3 * 2 * tokens * weights
    # Causal attention computes half of seq x seq: two products forward, five backward.
    attention = 7 * 2 * tokens * seq / 2 * h
    return {name: each / speed for name, each in moved.items()} | {
        "products": flops / (0.99e12 if plain else 1.98e12),
        "attention": attention / 0.99e12,
    }


def kernel_times(run: Any, gpu: bool, row: str) -> list[dict[str, Any]]:
    """Return the kernels of a call and their milliseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

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
    kinds = [*KINDS, "rest", *(["idle"] if any(each["kind"] == "idle" for each in kernels) else [])]
    sums = []
    for row in rows:
        mine = [each for each in kernels if each["row"] == row]
        parts = {k: sum(each["ms"] for each in mine if each["kind"] == k) for k in kinds}
        sums.append({"row": row, **parts, "all": sum(parts.values())})
    return sums


def gradient_errors(tiny: bool) -> list[dict[str, Any]]:
    """Return how far the gradients of two layers are from float64's, in norm, for each kind.

    The delayed scales are those of a step with the same tokens.
    """
    import copy

    from ligermodels import LayerPlan, LigerLlama, LlamaConfig, MemoryPlan, float8

    device = "cpu" if tiny else "cuda"
    changes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    changes |= {"num_key_value_heads": 4}
    sizes = {"num_hidden_layers": 2, "vocab_size": 2048} | (changes if tiny else {})
    torch.manual_seed(0)
    with torch.device(device):
        start = LigerLlama(LlamaConfig.preset("llama-3-8b", **sizes)).bfloat16()
    ids = torch.randint(2048, (1, 512 if tiny else 4096), device=device)

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: weight.grad.double() for name, weight in model.named_parameters()}

    exact = gradients(copy.deepcopy(start).double())
    found = []
    for row in (BF16, *RECIPES, *KEPT, *TORCHAO):
        model = copy.deepcopy(start)
        if row in (*RECIPES, *KEPT):
            recipe = row.removesuffix(IN_FLOAT8)
            float8.convert(model, recipe, filter=lambda name, linear: True)
            if row in KEPT:
                model.set_memory_plan(MemoryPlan.uniform(2, LayerPlan(float8=True)))
            if recipe == "delayed":
                gradients(model)
                torch.optim.SGD(model.parameters(), lr=0.0).step()
        elif row in TORCHAO:
            try:
                from torchao.float8 import Float8LinearConfig, convert_to_float8_training
            except ImportError:
                continue
            recipe = Float8LinearConfig.from_recipe_name(row.split()[-1])
            object.__setattr__(recipe, "emulate", tiny)
            convert_to_float8_training(model.layers, config=recipe)
        kinds: dict[str, list[float]] = {}
        for name, grad in gradients(model).items():
            off = float((grad - exact[name]).norm() / exact[name].norm())
            kinds.setdefault(name.removesuffix(".weight").rpartition(".")[2], []).append(off)
        found.append({"row": row} | {kind: max(errors) for kind, errors in kinds.items()})
    return found


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
            "both, with its amax": (
                4,
                lambda x=x, a=amax: float8_cast(x, a, e4m3, transposed=True, seen=a),
            ),
            "both, blocks": (
                4,
                lambda x=x: float8_cast(x, None, e4m3, transposed=True),
            ),
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
        a, _ = float8_cast(x, None, e4m3)
        for square in (True, False):
            b, _ = float8_cast(weight, None, e4m3, square=square)
            name = f"float8, blocks of 1 x 128 and {128 if square else 1} x 128"
            products[name] = timed(lambda a=a, b=b: float8_product(a, b, torch.bfloat16))
        for name, ms in products.items():
            found.append({"size": size, "op": name, "ms": ms, "rate": flops / ms / 1e9})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for float8.json")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, help="by default what fits, 16 or 32")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--workloads", type=int, default=9, help="how many at most")
    parser.add_argument("--no-steps", action="store_true", help="leave out the training steps")
    for option, key in PROFILES.items():
        parser.add_argument(option, dest=key, action="store_true")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="train with plans, too")
    parser.add_argument("--together", action="store_true", help="all rows in this process")
    parser.add_argument("--torch-adamw", action="store_true", help="PyTorch's for every row")
    parser.add_argument("--casts", action="store_true")
    parser.add_argument("--gradients", action="store_true", help="beside those of float64")
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--only", nargs=3, metavar=("ROW", "BATCH", "SEQ"))
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # 72 of 80 GiB
    tiny = arguments.tiny
    device = "cpu" if tiny else "cuda"
    layers = arguments.layers
    if layers is None:
        large = not tiny and torch.cuda.get_device_properties(0).total_memory > 75 * 2**30
        layers = 2 if tiny else 32 if large else 16

    def run(option: str, row: str, batch: int, seq: int) -> Any:
        if option == "--profile":
            return profile_row(row, batch, seq, device, tiny)
        words = (row, batch, seq, layers, arguments.steps, device, tiny)
        return step_row(*words, option == "--step-profile", torch_adamw=arguments.torch_adamw)

    if arguments.only:
        row, batch, seq = arguments.only[0], *map(int, arguments.only[1:])
        options = [option for option in PROFILES if arguments.__dict__[PROFILES[option]]]
        print(json.dumps(run(options[0] if options else "", row, batch, seq)))
        return
    workloads = ((1, 32), (2, 16)) if tiny else WORKLOADS[: arguments.workloads]
    command = [sys.executable, "-m", "benchmarks.float8", "--steps", str(arguments.steps)]
    command += ["--layers", str(layers), *(["--tiny"] if tiny else [])]
    command += ["--torch-adamw"] if arguments.torch_adamw else []

    def measure(option: str, row: str, batch: int, seq: int) -> Any:
        if arguments.together:
            try:
                return run(option, row, batch, seq)
            except Exception:  # the other rows go on
                traceback.print_exc()
                return None
            finally:
                release_memory()
        words = [option] * bool(option) + ["--only", row, str(batch), str(seq)]
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        print(done.stderr[-1500 if done.returncode else -200 :], file=sys.stderr)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None

    result: dict[str, Any] = {"environment": environment(), "steps": []}
    if not arguments.no_steps:
        for batch, seq in workloads:
            for row in arguments.rows:
                made = measure("", row, batch, seq)
                result["steps"].append(
                    made or {"row": row, "batch x seq": f"{batch} x {seq}", "ms": "failed"}
                )
                print(result["steps"][-1], flush=True)
                write("float8.json", result, arguments.out)
    if arguments.plans:
        result["plans"] = []
        planned = [(2, 16, True)] if tiny else [*PLANNED][: arguments.workloads]
        for batch, seq, trains in planned:
            for row in (row for row in arguments.rows if row not in (*KEPT, COMPILED)):
                words = (row, batch, seq, layers, arguments.steps, device, tiny)
                result["plans"].append(step_row(*words, plans=arguments.plans, trains=trains))
                release_memory()
                print(result["plans"][-1], flush=True)
                write("float8.json", result, arguments.out)
    batch, seq = workloads[0]
    for option, key in PROFILES.items():
        if arguments.__dict__[key]:
            result[key] = []
            for row in arguments.rows:
                result[key] += measure(option, row, batch, seq) or []
    if arguments.casts:
        result["casts"] = casts(64 if tiny else 8192, tiny)
    if arguments.gradients:
        result["gradient errors"] = found = gradient_errors(tiny)
        print(table(found, list(found[0])))
    write("float8.json", result, arguments.out)
    if arguments.casts:
        print(table(result["casts"], ["size", "op", "ms", "rate"]))
    profiles = [key for key in PROFILES.values() if result.get(key)]
    for key in profiles:
        for row in arguments.rows:
            kernels = [each for each in result[key] if each["row"] == row][:30]
            shown = [{"floor": "", **each, "kernel": each["kernel"][:60]} for each in kernels]
            if shown:
                print(table(shown, ["row", "kind", "kernel", "calls", "ms", "floor"]))
    print(result["environment"])
    for key in profiles:
        sums = kind_sums(result[key], arguments.rows)
        print("one block:" if key == "kernels" else "a step:")
        print(table(sums, list(sums[0])))
    columns = ["batch x seq", "row", "layers", "AdamW", "ms", "ms spread", "tokens/s", "peak GiB"]
    for key in ("steps", "plans"):
        if result.get(key):
            more = ["budget GiB", "predicted GiB"] if key == "plans" else []
            print(table(result[key], [*columns, *more, "last loss"]))


if __name__ == "__main__":
    main()
