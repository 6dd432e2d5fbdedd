"""Two ways to the activations of experts: python -m benchmarks.expert_gather

The product of gate and up for the rows of each expert, and its activation. "gathered" is one kernel
that reads each row where its token is, and activates. "copied" first copies the rows side by side,
calls torch's grouped product (in bf16, on this GPU), and has a kernel for the activation. "product"
is the product of "copied" alone. Routes are uniform, and gate and up are stored for backward. The
error is that of 61 rows beside float64, relative to their norm.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, device_time, environment, release_memory, table, write
from ligermodels.kernels.triton import expert_mlp, routing

BF16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
LAYERS: list[tuple[str, int, int, int, int, int, torch.dtype]] = [
    # tokens, hidden, inner, experts, experts of a token
    ("Qwen3-30B-A3B", 8192, 2048, 768, 128, 8, BF16),
    ("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8, BF16),
    ("Mixtral 8x7B", 8192, 4096, 14336, 8, 2, BF16),
    ("gpt-oss-20b's sizes", 8192, 2880, 2880, 32, 4, BF16),
    ("Qwen3-30B-A3B", 4096, 2048, 768, 128, 8, BF16),
    ("Qwen3-30B-A3B", 2048, 2048, 768, 128, 8, BF16),
    ("Qwen3-30B-A3B", 1024, 2048, 768, 128, 8, BF16),
    ("Qwen3.5-35B-A3B", 8192, 2048, 512, 256, 8, BF16),
    ("Gemma 4 26B-A4B", 8192, 2816, 704, 128, 8, BF16),
    ("of 1,024 columns", 8192, 2048, 1024, 64, 8, BF16),
    ("of 1,536 columns", 8192, 2048, 1536, 64, 8, BF16),
    ("Qwen3-235B-A22B", 8192, 4096, 1536, 128, 8, BF16),
    ("Qwen3-30B-A3B", 8192, 2048, 768, 128, 8, FLOAT16),
    ("gpt-oss-20b's sizes", 8192, 2880, 2880, 32, 4, FLOAT16),
    ("Qwen3-30B-A3B", 2048, 2048, 768, 128, 8, FLOAT32),
]


def rows_of(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to compute one layer."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
    weight = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=dtype) / hidden**0.5
    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
    order, place, starts = routing.sort_by_expert(chosen, experts)
    rows = expert_mlp.expert_rows(x, place)
    some = torch.arange(0, len(order), len(order) // 61, device="cuda").tolist()
    owner = chosen.flatten()[order].tolist()
    gate, up = torch.stack([weight[owner[i]].double() @ rows[i].double() for i in some]).chunk(2, 1)
    right = torch.cat([gate, up, gate * gate.sigmoid() * up], 1)

    def copied() -> tuple[Tensor, Tensor]:
        gate_up = expert_mlp.expert_linear(expert_mlp.expert_rows(x, place), weight.mT, starts)
        return gate_up, expert_mlp.expert_glu_forward(gate_up, None, None, "silu")

    def gathered() -> Any:
        expert_mlp.NARROW = 2**62  # for every size
        args = x, (order, place), weight.mT, starts, (None, None), "silu"
        return expert_mlp.expert_gate_up(*args)

    ways: list[Callable[[], Any]] = [gathered, copied]
    for run in ways:
        found = torch.cat([part[some] for part in run()], 1).double()
        row = {"way": run.__name__, "ms": device_time(run)["ms"]}
        yield row | {"error": ((found - right).norm() / right.norm()).item()}
    product = device_time(lambda: expert_mlp.expert_linear(rows, weight.mT, starts))["ms"]
    yield {"way": "product", "ms": product}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for expert_gather.json")
    out, rows = parser.parse_args().out, []
    for name, *sizes, dtype in LAYERS:
        layer = dict(zip(("tokens", "hidden", "inner", "experts", "top_k"), sizes))
        for row in rows_of(*sizes, dtype):
            flops = 4e-9 * sizes[0] * sizes[4] * sizes[1] * sizes[2]
            layer |= {"TFLOP/s": flops / row["ms"]}
            rows.append({"layer": name, "dtype": str(dtype)[6:], **row, **layer})
            print(*rows[-1].values(), flush=True)
            write("expert_gather.json", {"environment": environment(), "rows": rows}, out)
        release_memory()
    print(table(rows, ["layer", "tokens", "dtype", "way", "ms", "TFLOP/s", "error"]))


if __name__ == "__main__":
    main()
