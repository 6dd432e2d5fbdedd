"""Draw and tabulate ops.json, without a GPU: python -m benchmarks.plots [--results FOLDER]

This writes ops.md, ops.png and linear_ce.png beside ops.json. From step.json
and families.json it draws step.png, the picture of the README.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import OPS
from benchmarks.colours import COLOURS
from benchmarks.common import RESULTS, table
from ligermodels.pictures import INK, picture

Row = dict[str, Any]
Value = Callable[[Row], float]

OURS = "ligermodels"
BOTH, FORWARD = "forward + backward", "forward"


def size_text(sizes: dict[str, Any]) -> str:
    """Format sizes as "16384 x 4096"; a flag that is set appears by its name."""
    dimensions = [str(value) for value in sizes.values() if not isinstance(value, bool)]
    flags = [name for name, value in sizes.items() if value is True]
    return ", ".join([" x ".join(dimensions), *flags])


def column_of(implementation: str) -> tuple[str, str]:
    """Return the table column of an implementation, and the label of the variant in its cell."""
    name, _, variant = implementation.partition(" (")
    variant = variant.rstrip(")")
    if name in ("eager", "torch.compile", OURS):
        return name, variant
    if name == "liger":
        return "Liger", variant
    return "other peers", implementation.replace(" (", ", ").rstrip(")")


def waits(row: Row) -> bool:
    """Whether the row was timed around eager calls, because the call waits for the device."""
    return any(row.get(mode, {}).get("method") == "events" for mode in (BOTH, FORWARD))


def cells(rows: list[Row], value: Value) -> Row:
    """Return the table cells for the rows of one size. The smallest value is bold."""
    values = {row["implementation"]: value(row) for row in rows if "error" not in row}
    least = min(values.values(), default=0.0)
    found: dict[str, list[str]] = {}
    for row in rows:
        column, variant = column_of(row["implementation"])
        if "error" in row:
            text = row["error"].partition(":")[0]
        else:
            number = values[row["implementation"]]
            text = f"{number:.3g}"
            if number == least:
                text = f"**{text}**"
            text += "†" * waits(row)
        found.setdefault(column, []).append(f"{text} ({variant})" if variant else text)
    return {column: ", ".join(texts) for column, texts in found.items()}


def host_cell(result: Row, op: str) -> str:
    """Format the host microseconds as ours / Liger's. Liger's fastest variant counts."""
    microseconds: dict[str, float] = {}
    for row in result["rows"]:
        name, _, variant = row["implementation"].partition(" (")
        if row["op"] == op and "host us" in row and not (name == OURS and variant):
            microseconds[name] = min(row["host us"], microseconds.get(name, math.inf))
    names = [name for name in (OURS, "liger") if name in microseconds]
    return " / ".join(f"{microseconds[name]:.0f}" for name in names)


def op_table(result: Row, mode: str) -> str:
    """Return the table of milliseconds of every op at its table sizes."""
    lines = []
    for op, entry in OPS.items():
        for sizes in entry.table:
            rows = [
                row
                for row in result["rows"]
                if row["op"] == op
                and row["sizes"] == sizes
                and not row.get("host")
                and (mode in row or "error" in row)
            ]
            if not rows:
                continue
            line = {"op": entry.label, "size": size_text(sizes)}
            line |= cells(rows, lambda row: row[mode]["ms"])
            ours = [row for row in rows if row["implementation"] == OURS and mode in row]
            line["share of ceiling"] = f"{ours[0][mode]['share']:.0%}" if ours else ""
            if mode == BOTH:
                line["host us, ours / Liger"] = host_cell(result, op)
            lines.append(line)
    columns = ["op", "size", "eager", "torch.compile", "Liger", "other peers", OURS]
    columns += ["share of ceiling"] + ["host us, ours / Liger"] * (mode == BOTH)
    return table(lines, columns)


def scratch_table(result: Row) -> str:
    """Return the table of scratch GB, forward + backward, of the losses and fused linears."""
    lines = []
    for op, entry in OPS.items():
        for sizes in entry.table if entry.scratch else ():
            rows = [
                row
                for row in result["rows"]
                if row["op"] == op and row["sizes"] == sizes and not row.get("host")
            ]
            if rows:
                line = {"op": entry.label, "size": size_text(sizes)}
                lines.append(line | cells(rows, lambda row: row[BOTH]["scratch GB"]))
    return table(lines, ["op", "size", "eager", "torch.compile", "Liger", "other peers", OURS])


def other_runs(result: Row) -> list[str]:
    """Return one sentence for each run other than the one that measured most ops."""
    runs: dict[str, list[str]] = {}
    for op, part in result["ops"].items():
        name = "host times" if op == "host" else OPS[op].label
        runs.setdefault(part.get("run", ""), []).append(name)
    most = max(runs, key=lambda run: len(runs[run]), default="")
    return [
        f"Another run ({run or 'an earlier one'}) measured: {', '.join(names)}."
        for run, names in runs.items()
        if run != most
    ]


def markdown(result: Row) -> str:
    """Return the page with the tables, and the facts that are needed to read them."""
    versions = ", ".join(
        f"{name} {version}" for name, version in result["environment"].items() if name != "gpu"
    )
    faults = [f"{op}: {part['error']}" for op, part in result["ops"].items() if "error" in part]
    return "\n\n".join(
        [
            f"{result['environment']['gpu']}; {versions}.",
            *other_runs(result),
            *(f"This result is not complete: {fault}." for fault in faults),
            "Milliseconds of device time, forward + backward. † marks calls that wait for the "
            "device, so no CUDA graph can capture them; their time is that of eager calls:",
            op_table(result, BOTH),
            "Milliseconds of device time, forward alone:",
            op_table(result, FORWARD),
            "GB of scratch beyond inputs, outputs and gradients, forward + backward:",
            scratch_table(result) + "\n",
        ]
    )


# The ops of ops.png with the sizes of each: of Llama-3-8B, unless the op is of another model.
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "add_rms_norm": ("add + RMSNorm, 16384 x 4096", {"rows": 16384, "width": 4096}),
    "layer_norm": ("LayerNorm, 16384 x 4096", {"rows": 16384, "width": 4096}),
    "swiglu": ("SwiGLU, 8192 x 14336", {"rows": 8192, "width": 14336}),
    "geglu": ("GeGLU, 8192 x 9216", {"rows": 8192, "width": 9216}),
    "rope": ("RoPE, 2 x 8192 tokens", {"batch": 2, "seq": 8192}),
    "qk_norm_rope": ("q/k norm + RoPE, 8192 tokens", {"batch": 1, "seq": 8192, "heads": 8}),
    "glu_linear": ("SwiGLU + linear, 8192 tokens", {"rows": 8192, "width": 14336}),
    "norm_qkv_rope": ("norm + qkv + RoPE, 8192 tokens", {"seq": 8192, "width": 4096}),
    "cross_entropy": ("cross entropy, 8192 x 128256", {"rows": 8192, "vocab": 128256}),
    "linear_cross_entropy": (
        "linear CE, 8192 x 4096 x 128256",
        {"rows": 8192, "width": 4096, "vocab": 128256},
    ),
}
PEERS = {"torch.compile": "torch.compile", "liger": "Liger, its fastest variant"}


def times_of(result: Row, op: str, sizes: dict[str, Any]) -> dict[str, float]:
    """Return the least milliseconds of each library for an op at these sizes."""
    found: dict[str, float] = {}
    for row in result["rows"]:
        if row["op"] == op and sizes.items() <= row["sizes"].items() and BOTH in row:
            name = row["implementation"].partition(" ")[0]
            found[name] = min(row[BOTH]["ms"], found.get(name, math.inf))
    return found


def draw_ops(result: Row, path: Path) -> None:
    """Draw how many times as fast as eager PyTorch each op is, at the sizes of real models."""
    timed = {label: times_of(result, op, sizes) for op, (label, sizes) in REAL.items()}
    timed = {label: times for label, times in timed.items() if {OURS, "eager"} <= times.keys()}
    if not timed:
        return
    names = {**PEERS, OURS: OURS}
    with picture(9, 0.62 * len(timed) + 1.3) as figure:
        axes = figure.add_subplot()
        for place, times in enumerate(timed.values()):
            for bar, name in enumerate(names):
                if name not in times:
                    continue
                speed, at = times["eager"] / times[name], 4 * place + bar
                axes.barh(at, speed, height=0.88, color=COLOURS[name])
                bold = "bold" if name == OURS else "normal"
                axes.text(
                    max(speed, 1) + 0.1, at, f"{speed:.1f}", va="center", fontsize=8, weight=bold
                )
        axes.set_yticks([4 * place + 1 for place in range(len(timed))], list(timed), fontsize=9)
        axes.invert_yaxis()
        axes.axvline(1, color=INK, linewidth=1)
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        gpu, torch = (result["environment"][name] for name in ("gpu", "torch"))
        axes.set_title("Times as fast as eager PyTorch, forward + backward", weight="bold")
        figure.supxlabel(
            f"Longer is faster; the line is eager. {gpu}, torch {torch}, bf16.", size=9
        )
        for name, label in names.items():
            axes.barh(0, 0, color=COLOURS[name], label=label)
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=110)


def draw_linear_cross_entropy(result: Row, path: Path) -> None:
    """Draw the head's time against its scratch: ours by budget, and one point for each peer."""
    sizes = {"rows": 8192, "width": 4096, "vocab": 128256}
    rows = [row for row in result["rows"] if BOTH in row]
    peers = [row for row in rows if row["op"] == "linear_cross_entropy" and row["sizes"] == sizes]
    ours = [row for row in rows if row["op"] == "linear_cross_entropy_budget"]
    ours.sort(key=lambda row: row[BOTH]["scratch GB"])
    if not ours:
        return
    with picture(8.5, 4.8) as figure:
        axes = figure.add_subplot()
        for row in peers:
            name, _, variant = row["implementation"].partition(" ")
            if name == OURS:
                continue
            point = row[BOTH]["scratch GB"], row[BOTH]["ms"]
            axes.plot(*point, "D", color=COLOURS[name], markersize=8)
            text = f"{name} {variant}".strip().replace("liger", "Liger").replace("cce", "CCE")
            left = variant == "(bf16 sum)"
            place = {"xytext": (-9, 0) if left else (9, 0), "ha": "right" if left else "left"}
            axes.annotate(text, point, textcoords="offset points", va="center", size=9, **place)
        points = [(row[BOTH]["scratch GB"], row[BOTH]["ms"]) for row in ours]
        axes.plot(*zip(*points), "o-", color=COLOURS[OURS], linewidth=2.6, markersize=8)
        for row, point in zip(ours, points):
            budget = row["sizes"]["max_scratch_bytes"]
            name = "default" if budget is None else f"{budget >> 20} MiB"
            below = budget is None or budget >> 20 == 512
            place = {"xytext": (-4, -17) if below else (0, 9), "ha": "right" if below else "left"}
            color = COLOURS[OURS]
            axes.annotate(name, point, textcoords="offset points", color=color, size=9, **place)
        axes.set(xscale="log", xlabel="scratch beside inputs, outputs and gradients, GB (measured)")
        axes.set(ylabel="ms, forward + backward", ylim=(0, None))
        axes.margins(x=0.16)
        axes.grid()
        environment = result["environment"]
        axes.set_title("Linear cross entropy: choose its memory, and pay in time", weight="bold")
        figure.supxlabel(
            f"8192 tokens x 4096 x vocabulary 128256, bf16. The line is {OURS} by budget. "
            f"{environment['gpu']}, torch {environment['torch']}.",
            size=9,
        )
        figure.savefig(path, dpi=110)


def write_all(result: Row, folder: Path) -> None:
    """Write ops.md, and the pictures of the ops and of the head."""
    (folder / "ops.md").write_text(markdown(result))
    draw_ops(result, folder / "ops.png")
    draw_linear_cross_entropy(result, folder / "linear_ce.png")
    print(markdown(result))


# The workloads of step.png: a whole model, then parts of two others. Each entry is the file, what
# selects its rows there, and the title.
STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("step.json", {"batch x seq": "1 x 8192"}, "Llama-3-8B, all 32 layers, 8192 tokens"),
    ("families.json", {"family": "qwen3"}, "4 layers of Qwen3-8B, 4096 tokens"),
    ("families.json", {"family": "gemma3_text"}, "6 layers of Gemma 3 4B, 4096 tokens"),
]
BARS = {
    "transformers": COLOURS["transformers"],
    "transformers + liger": COLOURS["liger"],
    OURS: COLOURS[OURS],
}


def step_bars(folder: Path) -> list[tuple[str, list[Row]]]:
    """The title of each workload of step.png, and a row for each implementation in `BARS`."""
    files = {file: json.loads((folder / file).read_text())["rows"] for file, _, _ in STEPS}
    found = []
    for file, selected, title in STEPS:
        rows = [row for row in files[file] if selected.items() <= row.items()]
        by_name = {row["implementation"]: row for row in rows}
        found.append((title, [by_name[name] for name in BARS]))
    return found


def draw_steps(folder: Path, path: Path) -> None:
    """Time and memory of a training step as bars with their values, large enough for a phone.

    The bars of a workload are relative to transformers, so that workloads of any size fit.
    """
    workloads = step_bars(folder)
    quantities = (("ms", "Time of a step", "{:.0f} ms"), ("peak GiB", "Peak memory", "{:.1f} GiB"))
    with picture(6.4, 1.4 * len(workloads) + 1.5) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (quantity, title, text) in zip(panels, quantities):
            for number, (workload, rows) in enumerate(workloads):
                for bar, row in enumerate(rows):
                    name, place = row["implementation"], 5 * number + bar
                    share = row[quantity] / rows[0][quantity]
                    label = name if not number and axes is panels[0] else None
                    axes.barh(place, share, height=0.86, color=BARS[name], label=label)
                    words, weight = text.format(row[quantity]), "bold" if name == OURS else "normal"
                    axes.text(share + 0.02, place, words, va="center", weight=weight, fontsize=13)
                if axes is panels[0]:
                    axes.text(0, 5 * number - 0.65, workload, fontsize=13, va="bottom")
            axes.set_title(title, fontsize=15, weight="bold", pad=20)
            axes.spines[["bottom", "left"]].set_visible(False)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.margins(x=0.36)
            axes.set_xlim(left=0)
        panels[0].invert_yaxis()
        gpu = json.loads((folder / STEPS[0][0]).read_text())["environment"]["gpu"]
        figure.legend(
            loc="outside lower center",
            title=f"Shorter is better. One {gpu}, bf16, AdamW.",
            title_fontsize=13,
            fontsize=13,
            ncols=len(BARS),
            columnspacing=1,
            handlelength=1,
        )
        figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of ops.json")
    folder = parser.parse_args().results
    write_all(json.loads((folder / "ops.json").read_text()), folder)
    if all((folder / file).exists() for file, _, _ in STEPS):
        draw_steps(folder, folder / "step.png")


if __name__ == "__main__":
    main()
