"""Measure what a mask costs: python -m benchmarks.masks [--out FOLDER]

An attention layer and a block with the shapes of Llama-3-8B run forward and backward in bf16 on one
GPU: without a mask, with a mask of ones, with padding on the right and on the left, and with packed
documents that are as long as the rows. The script prints a table and writes masks.json. "mask us"
is the time on the device to make the mask, which the layers of a model share, and "waits" says
whether mask, forward or backward make the host wait for the GPU.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import device_time, environment, synchronises, table, write
from ligermodels.layers import (
    Attention,
    AttentionContext,
    AttentionMask,
    DecoderBlock,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
)
from ligermodels.layers.attention_backend import choose_backend, prepare
from ligermodels.layers.attention_mask import document_ids_from_positions

SHAPES = ((8, 2048), (1, 8192))
COLUMNS = "layer, batch x seq, mask, backend, ms, spread, to none, to documents, mask us, waits"
ROUNDS = 3


class Sizes(NamedTuple):
    """The shapes of a block. The defaults are those of Llama-3-8B."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8


class Case(NamedTuple):
    """A mask by its function, and the rows that it is for."""

    make: Callable[[], AttentionMask]
    rows: tuple[int, int]
    positions: Tensor


def cases(batch: int, seq: int, device: torch.device) -> dict[str, Case]:
    """Return the masks by name. Padding takes up to half of a row."""
    lengths = seq - (torch.arange(batch) + 1) * seq // (2 * batch)
    right = (torch.arange(seq) < lengths[:, None]).to(device, torch.int64)
    rows, positions = (batch, seq), torch.arange(seq, device=device)[None]
    joined = positions.repeat(1, batch)
    starts = torch.arange(0, batch * seq + 1, seq, dtype=torch.int32, device=device)

    def padded(mask: Tensor) -> Case:
        def make() -> AttentionMask:
            return AttentionMask(seq, padding_mask=mask, padding_at_ends=True)

        return Case(make, rows, positions)

    def documents() -> AttentionMask:
        ids = document_ids_from_positions(joined)
        total = batch * seq
        return AttentionMask(total, document_ids=ids, cu_seqlens=starts, max_seqlen=seq)

    return {
        "none": Case(lambda: AttentionMask(seq), rows, positions),
        "ones": padded(torch.ones_like(right)),
        "right": padded(right),
        "left": padded(right.flip(1)),
        "documents": Case(documents, (1, batch * seq), joined),
    }


def layers(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[nn.Module]:
    """Return an attention layer and a block, with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        attention, other = (Attention(sizes.hidden, sizes.heads, sizes.kv_heads) for _ in range(2))
        mlp = GatedMLP(sizes.hidden, sizes.inner)
        block = DecoderBlock(other, mlp, RMSNorm(sizes.hidden), RMSNorm(sizes.hidden))
    return [attention.to(dtype), block.to(dtype)]


def step(layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], mask: AttentionMask) -> Any:
    """Run a layer forward and backward; return the gradients of x and of the weights."""
    context = AttentionContext(*angles, mask)
    out = layer(x, context) if isinstance(layer, Attention) else layer(x, None, context)
    outputs = (out,) if isinstance(out, Tensor) else out
    inputs = [x, *layer.parameters()]
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs])


def measure(layer: nn.Module, batch: int, seq: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Return a row for each mask."""
    device, dtype, head_dim = torch.device("cuda"), torch.bfloat16, sizes.hidden // sizes.heads
    rotary = RotaryEmbedding(head_dim, 5e5).to(device)
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, case in cases(batch, seq, device).items():
        x = torch.randn(*case.rows, sizes.hidden, device=device, dtype=dtype).requires_grad_()
        angles, count = rotary(case.positions), case.rows[0]

        def prepared(case: Case = case, count: int = count) -> AttentionMask:
            mask = case.make()
            prepare(mask, None, None, count, sizes.heads, device, dtype, head_dim)
            return mask

        mask = prepared()
        steps[name] = partial(step, layer, x, angles, mask)
        steps[name]()
        choice = (None, None, device, dtype, head_dim, count * sizes.heads)
        rows[name] = {
            "layer": type(layer).__name__,
            "batch x seq": f"{batch} x {seq}",
            "mask": name,
            "backend": choose_backend(mask, *choice),
            "mask us": 0.0 if name == "none" else 1e3 * device_time(prepared)["ms"],
            "waits": synchronises(lambda x=x, a=angles, make=prepared: step(layer, x, a, make())),
        }
    # The masks take turns, so that a change of the clock does not favour one.
    rounds = [{name: device_time(run) for name, run in steps.items()} for _ in range(ROUNDS)]
    times = {name: [each[name]["ms"] for each in rounds] for name in rows}
    for name, row in rows.items():
        row["ms"] = statistics.median(times[name])
        row["spread"] = max(times[name]) - min(times[name])
        row["method"] = rounds[0][name]["method"]
        for other in ("none", "documents"):
            row[f"to {other}"] = row["ms"] / statistics.median(times[other])
    return [*rows.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for masks.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    rows: list[dict[str, Any]] = []
    sizes = Sizes()
    both = layers(sizes, torch.device("cuda"), torch.bfloat16)
    for (batch, seq), layer in product(SHAPES, both):
        rows += measure(layer, batch, seq, sizes)
        write("masks.json", {"environment": environment(), "rows": rows}, arguments.out)
    print(table(rows, COLUMNS.split(", ")))


if __name__ == "__main__":
    main()
