"""Measure attention: python -m benchmarks.attention [--out FOLDER]

Heads of 512 (those of Gemma 4: 16 of queries, 4 of keys) beside the backends of PyTorch, and heads
of 64 (those of gpt-oss: 64 of queries, 8 of keys) with and without sinks, forward and backward in
bf16 on one GPU. TFLOP/s count 4 * head_dim FLOP for each query, head and key that is seen, and 2.5
times that for backward. The script prints a table and writes attention.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.common import device_time, environment, peak_bytes, release_memory, table, write
from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory.rates import attention_pairs

COLUMNS = (
    "heads, batch x seq, documents, window, implementation, forward ms, both ms, TFLOP/s, "
    "peak MiB, error"
)
Attend = Callable[..., Tensor]


def of_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call a kernel of PyTorch; those that take such heads need a key head for each query head."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def of_flex(seq: int) -> Attend:
    blocks = create_block_mask(lambda b, h, i, j: j <= i, 1, None, seq, seq, device="cuda")
    return partial(torch.compile(flex_attention), block_mask=blocks, scale=1.0, enable_gqa=True)


def measure(
    name: str,
    shape: tuple[int, ...],
    run: Attend,
    window: int | None = None,
    *more: Tensor,
    documents: int = 1,
) -> dict[str, Any]:
    """Return the row of an implementation; `more` are tensors that need a gradient, too.

    Args: documents: how many of one length a row has, which the mask of `run` knows.
    """
    batch, seq, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    q, k, v, upstream = (
        torch.randn(batch, seq, n, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    row: dict[str, Any] = {"heads": f"{heads}, {kv_heads} of {head_dim}", "window": window or ""}
    row |= {"batch x seq": f"{batch} x {seq}", "documents": documents, "implementation": name}

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(*leaves), [*leaves, *more], upstream)

    try:
        row["peak MiB"] = peak_bytes(both) / 2**20
        row["both ms"] = device_time(both)["ms"]
        with torch.no_grad():
            run(*leaves)
            row["forward ms"] = device_time(lambda: run(*leaves))["ms"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    else:
        pairs = documents * attention_pairs(seq // documents, window)
        flop = 3.5 * 4 * head_dim * batch * heads * pairs
        row["TFLOP/s"] = flop / row["both ms"] / 1e9
    release_memory()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for attention.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    sinks = torch.zeros(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plain, short = AttentionMask(8192), AttentionMask(2048)
    runs: list[Callable[[], dict[str, Any]]] = []

    def add(*given: Any, **options: Any) -> None:
        runs.append(partial(measure, *given, **options))

    for window in (None, 128):
        run = partial(attend, mask=plain, scale=0.125, window=window)
        shape = 1, 8192, 64, 8, 64
        add("ligermodels, no sinks", shape, run, window)
        add("ligermodels, sinks", shape, partial(run, sinks=sinks), window, sinks)
    for mask, batch in ((plain, 1), (short, 8)):
        shape = batch, mask.queries, 16, 4, 512
        add("ligermodels", shape, partial(attend, mask=mask, scale=1.0))
        for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            add(backend.name.lower(), shape, partial(of_torch, backend))
    add("flex_attention", (1, 8192, 16, 4, 512), of_flex(8192))
    near = partial(attend, mask=plain, scale=1.0, window=1024)
    add("ligermodels", (1, 8192, 16, 4, 512), near, 1024)
    for seq, documents in ((32768, 1), (8192, 8), (32768, 16)):
        shape = 1, seq, 16, 4, 512
        ids = torch.arange(seq, device="cuda")[None] // (seq // documents)
        mask = AttentionMask(seq, document_ids=ids if documents > 1 else None)
        add("ligermodels", shape, partial(attend, mask=mask, scale=1.0), documents=documents)
        if documents == 1:
            efficient = SDPBackend.EFFICIENT_ATTENTION
            add(efficient.name.lower(), shape, partial(of_torch, efficient))
    rows = []
    for each in runs:
        rows.append(each())
        write("attention.json", {"environment": environment(), "rows": rows}, arguments.out)
        print(rows[-1], flush=True)
    print(table(rows, COLUMNS.split(", ")))


if __name__ == "__main__":
    main()
