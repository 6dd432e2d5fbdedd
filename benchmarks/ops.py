"""Every op beside eager PyTorch, torch.compile and Liger: python -m benchmarks.ops [--out FOLDER]

Forward plus backward on bf16 inputs with random upstream gradients; device time is the median of
20 calls, host time the median of 50, memory what a call adds at its peak, results included.
"""

import argparse
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import (
    copy_bandwidth,
    device_times,
    environment,
    host_microseconds,
    peak_bytes,
    table,
    write,
)
from ligermodels import kernels

Implementations = dict[str, Callable[..., Any]]


def randn(*shape: int, grad: bool = True, scale: float = 1.0) -> Tensor:
    tensor = torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * scale
    return tensor.requires_grad_(grad)


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm(rows: int, width: int) -> tuple[list[Tensor], int, Implementations]:
    from liger_kernel.transformers.functional import liger_rms_norm

    return (
        [randn(rows, width), randn(width)],
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        5 * rows * width * 2,
        {
            "eager": eager_norm,
            "F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
            "compile": torch.compile(eager_norm),
            "liger": lambda x, w: liger_rms_norm(x, w, 1e-6, in_place=False),
            "ligermodels": lambda x, w: kernels.rms_norm(x, w, 1e-6),
        },
    )


def add_rms_norm(rows: int, width: int) -> tuple[list[Tensor], int, Implementations]:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager_norm(total, weight), total

    return (
        [randn(rows, width), randn(rows, width), randn(width)],
        # Forward reads x, residual and writes y, sum; backward reads sum, dy, dsum, writes dx.
        8 * rows * width * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": lambda x, r, w: liger_fused_add_rms_norm(x, r, w, 1e-6, in_place=False),
            "ligermodels": lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-6),
        },
    )


def swiglu(rows: int, width: int) -> tuple[list[Tensor], int, Implementations]:
    from liger_kernel.transformers.functional import liger_swiglu

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    return (
        [randn(rows, 2 * width)],
        8 * rows * width * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": lambda gate_up: liger_swiglu(*gate_up.chunk(2, -1)),
            "ligermodels": kernels.swiglu,
        },
    )


def geglu(rows: int, width: int) -> tuple[list[Tensor], int, Implementations]:
    from liger_kernel.transformers.functional import liger_geglu

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    return (
        [randn(rows, 2 * width)],
        8 * rows * width * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": lambda gate_up: liger_geglu(*gate_up.chunk(2, -1)),
            "ligermodels": kernels.geglu,
        },
    )


def rope(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int):
    from liger_kernel.transformers.functional import liger_rope

    angles = torch.rand(1, seq, head_dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (torch.cat((t, t), -1).bfloat16() for t in (cos, sin))

    def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def eager(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split(qkv)

        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * wide_cos + torch.cat((-b, a), -1) * wide_sin

        return rotate(q), rotate(k), v

    def liger(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split(qkv)
        # In place on its inputs, hence the copies that leave qkv intact.
        return *liger_rope(q.clone(), k.clone(), wide_cos, wide_sin), v

    return (
        [randn(batch, seq, (heads + 2 * kv_heads) * head_dim)],
        # Read and write of packed q, k, v, each way.
        4 * batch * seq * (heads + 2 * kv_heads) * head_dim * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": liger,
            "ligermodels": lambda qkv: kernels.rope(qkv, cos, sin, heads, kv_heads),
        },
    )


def qk_norm_rope(batch: int, seq: int, heads: int, kv_heads: int, head_dim: int):
    _, _, ropes = rope(batch, seq, heads, kv_heads, head_dim)
    angles = torch.rand(1, seq, head_dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()

    def by_parts(norm: Callable[..., Tensor], rotate: Callable[..., Any]) -> Callable[..., Any]:
        def run(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
            q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
            parts = norm(q, q_weight), norm(k, k_weight), v
            return rotate(torch.cat([part.flatten(-2) for part in parts], -1))

        return run

    eager = by_parts(eager_norm, ropes["eager"])
    return (
        [randn(batch, seq, (heads + 2 * kv_heads) * head_dim), randn(head_dim), randn(head_dim)],
        # Forward reads q, k and writes them; backward reads q, k, dq, dk, dv and writes all three.
        batch * seq * (5 * (heads + kv_heads) + 2 * kv_heads) * head_dim * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "ligermodels, rms_norm and rope apart": by_parts(
                kernels.rms_norm, lambda qkv: kernels.rope(qkv, cos, sin, heads, kv_heads)
            ),
            "ligermodels": lambda qkv, q_weight, k_weight: kernels.qk_norm_rope(
                qkv, q_weight, k_weight, cos, sin, heads, kv_heads
            ),
        },
    )


def layer_norm(rows: int, width: int) -> tuple[list[Tensor], int, Implementations]:
    from liger_kernel.transformers.functional import liger_layer_norm

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-5)

    return (
        [randn(rows, width), randn(width), randn(width)],
        5 * rows * width * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "liger": lambda x, w, b: liger_layer_norm(x, w, b, 1e-5),
            "ligermodels": kernels.layer_norm,
        },
    )


def cross_entropy(rows: int, vocab: int) -> tuple[list[Tensor], int, Implementations]:
    from liger_kernel.transformers.functional import liger_cross_entropy

    targets = torch.randint(0, vocab, (rows,), device="cuda")

    def eager(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    return (
        [randn(rows, vocab)],
        3 * rows * vocab * 2,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            # In place on the logits, hence the copy that leaves them intact.
            "liger (copying)": lambda logits: liger_cross_entropy(logits.clone(), targets),
            "ligermodels": lambda logits: kernels.cross_entropy(logits, targets)[0],
        },
    )


def linear_cross_entropy(rows: int, width: int, vocab: int):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    targets = torch.randint(0, vocab, (rows,), device="cuda")

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    return (
        [randn(rows, width), randn(vocab, width, scale=0.02)],
        0,
        {
            "eager": eager,
            "compile": torch.compile(eager),
            "liger (bf16 sum)": lambda h, w: liger_fused_linear_cross_entropy(h, w, targets),
            "liger (float32 sum)": lambda h, w: liger_fused_linear_cross_entropy(
                h, w, targets, accum_dtype=torch.float32
            ),
            "ligermodels": lambda h, w: kernels.linear_cross_entropy(h, w, targets)[0],
        },
    )


CASES: list[tuple[Callable[..., Any], tuple[int, ...]]] = [
    (rms_norm, (16384, 2048)),
    (rms_norm, (16384, 4096)),
    (rms_norm, (16384, 8192)),
    (add_rms_norm, (16384, 4096)),
    (swiglu, (8192, 14336)),
    (geglu, (8192, 9216)),
    (rope, (2, 8192, 32, 8, 128)),
    (qk_norm_rope, (2, 8192, 32, 8, 128)),
    (qk_norm_rope, (1, 8192, 8, 4, 256)),
    (layer_norm, (16384, 4096)),
    (cross_entropy, (8192, 128256)),
    (linear_cross_entropy, (8192, 4096, 128256)),
    (linear_cross_entropy, (32768, 4096, 128256)),
    (linear_cross_entropy, (8192, 2304, 256000)),
    (linear_cross_entropy, (16384, 2048, 128256)),
]


def measure(function: Callable[..., Any], inputs: list[Tensor]) -> dict[str, Any]:
    """Times and memory of forward plus backward of `function` on `inputs`."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(output) for output in outputs]
    del outputs

    def run() -> tuple[Tensor, ...]:
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return torch.autograd.grad(results, inputs, upstream)

    with torch.no_grad():
        forward = statistics.median(device_times(lambda: function(*inputs)))
    times = device_times(run)
    return {
        "forward ms": forward,
        "ms": statistics.median(times),
        "ms spread": max(times) - min(times),
        "host us": host_microseconds(run),
        "peak GB": peak_bytes(run) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for ops.json and ops.md")
    parser.add_argument("--only", nargs="*", help="names of ops; default all")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    rows = []
    for case, sizes in CASES:
        if arguments.only and case.__name__ not in arguments.only:
            continue
        if case is linear_cross_entropy and sizes[0] == 32768:
            skip = ("eager", "compile")  # the logits alone would take 8 to 17 GB several times
        else:
            skip = ()
        torch.manual_seed(0)
        inputs, fewest_bytes, implementations = case(*sizes)
        for name, function in implementations.items():
            if name in skip:
                continue
            row: dict[str, Any] = {"op": case.__name__, "size": " x ".join(map(str, sizes))}
            row["implementation"] = name
            try:
                row |= measure(function, inputs)
            except Exception:  # a peer that fails is a result, not the end of the run
                traceback.print_exc()
                row["ms"] = "failed"
            else:
                if fewest_bytes:
                    row["% of copy"] = 100 * fewest_bytes / (row["ms"] / 1e3) / bandwidth
            rows.append(row)
            torch.cuda.empty_cache()
        del inputs, implementations
        torch._dynamo.reset()
    columns = [
        "op",
        "size",
        "implementation",
        "forward ms",
        "ms",
        "ms spread",
        "% of copy",
        "host us",
        "peak GB",
    ]
    text = table(rows, columns)
    result = {"environment": environment(), "copy GB/s": bandwidth / 1e9, "rows": rows}
    write("ops.json", result, arguments.out)
    print(result["environment"], f"copy {bandwidth / 1e9:.0f} GB/s")
    print(text)


if __name__ == "__main__":
    main()
