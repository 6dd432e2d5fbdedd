"""Predict step times and memory on many GPUs, from what one and two GPUs measured.

`python docs/scaling.py` updates the tables in docs/scaling.md. The tests check that the page is
current, and how far predictions for two GPUs are from what was measured there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ligermodels.models.llama import LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "benchmarks" / "results"
GIB = 2**30
ROW = 8192  # tokens
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODELS = ("llama-3-8b", "llama-3-70b")
HOST_GPUS = 8
# These are not measured here. By its data sheet, a host of H200s has eight network links of
# 50 GB/s. Of that, 0.8 is taken to be reached, and each host in a ring to add 5 microseconds.
NETWORK = 0.8 * 8 * 50e9
HOP = 5e-6
GPU_GIB = 139.0  # that torch can allocate on an H200
SPARE = 0.9  # the part of it that a step may fill; the rest is for fragments and NCCL

# Bytes per weight: of float32 weights and AdamW's two moments, and of the gradient.
STATE, GRAD = 12, 4


@dataclass(frozen=True)
class Layout:
    """A mesh, by the sizes of its dimensions, and whether blocks are computed again in backward."""

    shard: int = 1
    replicate: int = 1
    tp: int = 1
    cp: int = 1
    reshards: bool = True
    recomputes: bool = False

    @property
    def gpus(self) -> int:
        return self.shard * self.replicate * self.tp * self.cp

    def __str__(self) -> str:
        sizes = {
            "dp_replicate": self.replicate,
            "dp_shard": self.shard,
            "tp": self.tp,
            "cp": self.cp,
        }
        name = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
        return name + (", recomputed" if self.recomputes else "")


@dataclass(frozen=True)
class Sizes:
    """The weights of a model's layers and of its head (as many as its embedding's)."""

    layers: int
    hidden: int
    key_width: int
    vocab: int
    per_layer: int

    @classmethod
    @cache
    def of(cls, preset: str) -> Sizes:
        config = LlamaConfig.preset(preset)
        h, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
        per_layer = 2 * h * h + 2 * h * keys + 3 * h * config.intermediate_size
        return cls(config.num_hidden_layers, h, keys, config.vocab_size, per_layer)

    @property
    def blocks(self) -> int:
        return self.layers * self.per_layer

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def all(self) -> int:
        return self.blocks + 2 * self.head

    def product_flops(self, tokens: float) -> float:
        """Forward and backward: six for each weight and token."""
        return 6 * tokens * (self.blocks + self.head)

    def attention_flops(self, tokens: float, row: int) -> float:
        """Forward has two products and backward five, of two operations for each pair."""
        return 14 * self.layers * self.hidden * tokens * row / 2


@dataclass(frozen=True)
class Rates:
    """What was measured: FLOP/s, bytes/s, and the seconds of all other kernels.

    Attributes:
        products: of the linear cross entropy, its exponentials included.
        attention: from steps of the same tokens in long and in short rows.
        copies: bytes read and written.
        link: bytes/s that a rank receives beside other work, in seconds that they add to a step.
        waited: bytes/s that a rank receives while it waits, smaller products included.
        others: seconds of a token in a layer, for each element of a hidden state.
    """

    products: float
    attention: float
    copies: float
    link: float
    waited: float
    others: float


def _rows(file: str, section: str | None = None) -> list[dict[str, Any]]:
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = (found if section is None else found[section])["rows"]
    return rows


def measured(name: str, section: str) -> dict[str, Any]:
    """Return a row that two GPUs measured."""
    rows = _rows("parallel.json", f"{section}, 2 x NVIDIA H200")
    return next(row for row in rows if row["name"] == name)


@cache
def rates() -> Rates:
    """Derive the rates from the results in benchmarks/results, all of Llama-3-8B's sizes."""
    sizes = Sizes.of("llama-3-8b")
    head = measured("whole vocabulary on each", "head")["ms"] / 1e3
    products = 6 * ROW * sizes.head / head
    ours = [row for row in _rows("step.json") if row["implementation"] == "ligermodels"]
    step = {row["batch x seq"]: row["ms"] / 1e3 for row in ours}
    pairs = sizes.attention_flops(ROW, ROW) - sizes.attention_flops(ROW, 512)
    attention = pairs / (step["1 x 8192"] - step["16 x 512"])
    ops = json.loads((RESULTS / "ops.json").read_text(encoding="utf-8"))["ops"]
    copies = ops["rms_norm"]["copy GB/s"] * 1e9
    # bfloat16 AdamW reads four numbers for each weight and writes three.
    known = 14 * sizes.all / copies
    known += sizes.product_flops(ROW) / products + sizes.attention_flops(ROW, ROW) / attention
    others = (step["1 x 8192"] - known) / (ROW * sizes.layers * sizes.hidden)
    # Resharding gathers the blocks and the head twice, and copies them once more out of a buffer.
    twice = sizes.blocks + sizes.head
    again = measured("ligermodels", "fsdp")["ms"]
    again -= measured("ligermodels, no resharding", "fsdp")["ms"]
    link = twice * 2 / 2 / (again / 1e3 - 4 * twice / copies)
    found = Rates(products, attention, copies, link, float("inf"), others)
    # What tensor parallelism adds to half of the work.
    alone = _seconds(found, sizes, Layout(tp=2), ROW // 2, ROW)
    received = _states(sizes, ROW) / 2
    waited = received / (measured("tp 2", "tp")["ms"] / 1e3 - alone)
    return replace(found, waited=waited)


def _states(sizes: Sizes, tokens: int) -> float:
    """Return the bytes that tensor parallelism gathers and scatters.

    Forward gathers and scatters the hidden states twice in a layer, backward too, and it gathers
    them twice more.
    """
    return 10.0 * 2 * tokens * sizes.hidden * sizes.layers


def _received(size: float, ranks: int) -> float:
    """Return the bytes that a rank receives when `size` bytes are gathered or scattered."""
    return size * (ranks - 1) / ranks


def _network(size: float, ranks: int, hosts: int, count: int) -> float:
    """Return the seconds that `count` collectives of `size` bytes take over several hosts."""
    return _received(size, ranks) / NETWORK + count * HOP * (hosts - 1) if hosts > 1 else 0.0


def step_seconds(preset: str, layout: Layout, tokens: int, row: int = ROW) -> float:
    """Return the seconds of a step with AdamW. `tokens` are those that a GPU computes."""
    return _seconds(rates(), Sizes.of(preset), layout, tokens, row)


def _seconds(rate: Rates, sizes: Sizes, layout: Layout, tokens: int, row: int) -> float:
    part = sizes.all / layout.tp  # of the weights, which a `tp` rank works with
    shards = layout.shard * layout.cp
    compute = sizes.product_flops(tokens) / rate.products
    compute += sizes.attention_flops(tokens, row) / rate.attention
    compute += tokens * sizes.layers * sizes.hidden * rate.others
    if layout.recomputes:  # all of a block's forward but attention, whose output is kept
        compute += 2 * tokens * sizes.blocks / rate.products
    gathers = 2 if layout.reshards and shards > 1 else 1
    # AdamW reads and writes seven float32 numbers. A weight is rounded, copied out of the buffer
    # of each gathering, and its gradient is copied into the buffer of the reduction.
    compute += (28 + 6) * part / shards / rate.copies
    if shards > 1:
        compute += (4 * gathers + 6) * part / rate.copies
    # Ranks of a `tp` or `cp` group are neighbours in a host, and those of `dp_shard` follow.
    inner = layout.tp * layout.cp
    hosts = -(-layout.shard * inner // HOST_GPUS)
    count = (gathers + 1) * (sizes.layers + 2)
    size = (2 * gathers + 4) * part
    added = _received(size, shards) / rate.link
    network = _network(size, shards, hosts, count)
    if layout.replicate > 1:  # an all-reduce of float32 shards is a scatter and a gather
        # All GPUs of a host reduce their own shards over the host's links.
        together = min(shards * layout.tp, HOST_GPUS)
        size = 8 * part / shards * together
        network += _network(size, layout.replicate, layout.gpus // HOST_GPUS, 2 * count)
    # Keys and values are gathered in bfloat16, and their gradients are summed in float32.
    keys = (4 + 8) * tokens * layout.cp * sizes.key_width * sizes.layers
    waited = _received(_states(sizes, tokens * layout.tp), layout.tp) + _received(keys, layout.cp)
    shown = max(0.0, network - compute)
    return compute + added + shown + waited / rate.waited


def peak_gib(preset: str, layout: Layout, tokens: int) -> float:
    """Return the peak of allocated memory of a GPU: at the end of forward, or of backward."""
    sizes = Sizes.of(preset)
    shards = layout.shard * layout.cp
    own = sizes.all / layout.tp / shards
    per_token = 2 if layout.recomputes else 11.5  # hidden states, in bfloat16; see memory.md
    kept = per_token * 2 * tokens * sizes.hidden * sizes.layers
    if layout.recomputes:  # one block's
        kept += 11.5 * 2 * tokens * sizes.hidden
    scratch = measured("whole vocabulary on each", "head")["scratch GiB"] * GIB
    scratch *= sizes.hidden / Sizes.of("llama-3-8b").hidden / layout.tp
    gathered = 0.0
    if shards > 1:
        gathered = 2 * sizes.head / layout.tp
        if not layout.reshards:
            gathered += 2 * sizes.blocks / layout.tp
    forward = STATE * own + kept + scratch + gathered
    # Two blocks are gathered at once, and the gradients of one are in a buffer in float32.
    buffers = (2 * 2 + 2 + 4) * sizes.per_layer / layout.tp if shards > 1 else 0.0
    return max(forward, (STATE + GRAD) * own + buffers) / GIB


def layouts(gpus: int) -> list[Layout]:
    """Return the layouts to choose from, the simplest first."""
    found = [Layout(shard=gpus)]
    found += [Layout(shard=each, replicate=gpus // each) for each in (8, 16, 32, 64) if each < gpus]
    found += [Layout(shard=gpus // each, cp=each) for each in (2, 4, 8)]
    found += [Layout(shard=gpus // each, tp=each) for each in (2, 4, 8)]
    return [each for one in found for each in (one, replace(one, recomputes=True))]


def fits(preset: str, layout: Layout, tokens: int) -> bool:
    """Whether a step fits a GPU, with some memory to spare."""
    return peak_gib(preset, layout, tokens) <= SPARE * GPU_GIB


def ranking(preset: str, gpus: int, rows: float) -> list[tuple[float, Layout]]:
    """Return the layouts that fit, with so many rows for each GPU, and their seconds.

    The fastest is first. Layouts within 4% of the fastest cannot be told apart by these
    predictions. Then the simplest one is first.
    """
    tokens = round(rows * ROW)
    able = [
        (step_seconds(preset, each, tokens), each)
        for each in layouts(gpus)
        if each.tp * each.cp * rows >= 1 and fits(preset, each, tokens)
    ]
    if not able:
        return []
    least = min(seconds for seconds, _ in able)
    first = next(pair for pair in able if pair[0] <= 1.04 * least)
    able.remove(first)
    return [first, *sorted(able, key=lambda pair: pair[0])]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _kind(layout: Layout) -> str:
    return "tp" if layout.tp > 1 else "cp" if layout.cp > 1 else "shard"


CHECKS = {
    "FSDP2": (Layout(shard=2), "ligermodels", "fsdp"),
    "FSDP2, no resharding": (
        Layout(shard=2, reshards=False),
        "ligermodels, no resharding",
        "fsdp",
    ),
    "tensor parallel": (Layout(tp=2), "tp 2", "tp"),
}


def checks() -> dict[str, tuple[float, float, float, float]]:
    """Return ms and GiB for the layouts that two GPUs measured: predicted, and measured."""
    found = {}
    for name, (layout, row, section) in CHECKS.items():
        tokens = ROW // layout.tp
        ms = step_seconds("llama-3-8b", layout, tokens) * 1e3
        there = measured(row, section)
        gib = peak_gib("llama-3-8b", layout, tokens)
        found[name] = (ms, there["ms"], gib, there["peak GiB"])
    return found


def tables() -> dict[str, str]:
    """Return the page's tables by their names."""
    rate = rates()
    made = {
        "rates": _table(
            ["what", "rate", "from"],
            [
                ["products", f"{rate.products / 1e12:.0f} TFLOP/s", "linear cross entropy"],
                [
                    "attention",
                    f"{rate.attention / 1e12:.0f} TFLOP/s",
                    "steps of 1 x 8192 and 16 x 512",
                ],
                ["copies", f"{rate.copies / 1e12:.2f} TB/s", "the table of ops"],
                [
                    "NVLink beside other work",
                    f"{rate.link / 1e9:.0f} GB/s",
                    "FSDP2 with and without resharding",
                ],
                ["NVLink waited for", f"{rate.waited / 1e9:.0f} GB/s", "tensor parallel on 2 GPUs"],
                ["network of a host", f"{NETWORK / 1e9:.0f} GB/s", "0.8 of its data sheet"],
            ],
        ),
        "checks": _table(
            ["Llama-3-8B on two GPUs", "ms", "measured", "error", "GiB", "measured", "error"],
            [
                [
                    name,
                    *(f"{ms:.0f}", f"{its:.0f}", f"{ms / its - 1:+.1%}"),
                    *(f"{gib:.1f}", f"{held:.1f}", f"{gib / held - 1:+.1%}"),
                ]
                for name, (ms, its, gib, held) in checks().items()
            ],
        ),
    }
    for name, rows in (("row", 1.0), ("scarce", 1 / HOST_GPUS)):
        lines = []
        for preset in MODELS:
            for gpus in GPUS:
                ranked = ranking(preset, gpus, rows)
                found = ["none fits", "", "", "", ""]
                if ranked:
                    (seconds, layout), tokens = ranked[0], round(rows * ROW)
                    others = [
                        f"{other} ({time / seconds - 1:+.0%})"
                        for time, other in ranked[1:]
                        if _kind(other) != _kind(layout)
                    ]
                    found = [
                        str(layout),
                        f"{seconds * 1e3:.0f}",
                        f"{tokens / seconds:.0f}",
                        f"{peak_gib(preset, layout, tokens):.0f}",
                        next(iter(others), ""),
                    ]
                lines.append([preset, str(gpus), *found])
        made[name] = _table(
            ["model", "GPUs", "layout", "ms", "tokens/s/GPU", "GiB", "instead"], lines
        )
    return made


def drawn(text: str) -> str:
    """Return a page with its tables made anew. Each is between two comments with its name."""
    for name, table in tables().items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
