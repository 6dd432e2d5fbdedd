"""Draw and tabulate ops.json, without a GPU: python -m benchmarks.plots [--results FOLDER]

This writes ops.md, ops_time.png and linear_ce.png beside ops.json. From step.json
and families.json it draws step.png, the picture of the README.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cases import OPS
from benchmarks.common import COLOURS, RESULTS, table

Row = dict[str, Any]
Value = Callable[[Row], float]

OURS = "ligermodels"
BOTH, FORWARD = "forward + backward", "forward"
# The dashes and the marker of each line. Variants of one library have its colour and marker.
STYLES = {
    "eager": ("-", "s"),
    "F.rms_norm": ("--", "x"),
    "torch.compile": ("-", "^"),
    "torch linear_cross_entropy": ("--", "x"),
    "liger": ("-", "D"),
    "liger (in place)": (":", "D"),
    "liger (copying)": ("-", "D"),
    "liger (norm, then rope)": ("-", "D"),
    "liger (bf16 sum)": (":", "D"),
    "liger (float32 sum)": ("-", "D"),
    "liger (kernel)": ("-", "D"),
    "liger (chunked)": (":", "D"),
    "trl": ("-", "P"),
    "cce (filtered)": (":", "v"),
    "cce (exact)": ("-", "v"),
    OURS: ("-", "o"),
    "ligermodels (in place)": (":", "o"),
    "ligermodels (skip_ignored)": ("--", "o"),
}


def style_of(name: str) -> tuple[str, str, str]:
    """Return the colour, the dashes and the marker of an implementation."""
    return COLOURS[name.partition(" ")[0]], *STYLES[name]


def select(result: Row, op: str, x: str, fixed: dict[str, Any]) -> list[Row]:
    """Return the op's rows of device times that have the `fixed` sizes, sorted by size `x`."""
    rows = [
        row
        for row in result["rows"]
        if row["op"] == op
        and not row.get("host")
        and all(row["sizes"][name] == value for name, value in fixed.items())
    ]
    return sorted(rows, key=lambda row: row["sizes"][x])


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


def _figure(rows: int, columns: int) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * columns, 3.1 * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _lines(axes: Any, rows: list[Row], x: str, value: Value) -> None:
    """Plot one line per implementation; ours is thicker and on top."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "error" not in row:
            by_name.setdefault(row["implementation"], []).append((row["sizes"][x], value(row)))
    for name, points in by_name.items():
        colour, dashes, marker = style_of(name)
        ours = name.startswith(OURS)
        axes.plot(
            *zip(*points),
            color=colour,
            linestyle=dashes,
            marker=marker,
            label=name,
            linewidth=2.6 if ours else 1.3,
            markersize=6 if ours else 4,
            zorder=3 if ours else 2,
        )


def _floor(axes: Any, rows: list[Row], x: str, mode: str) -> None:
    """Plot the floor: the time of the fewest bytes at copy speed, or of the products alone."""
    points = {
        row["sizes"][x]: row[mode]["floor ms"]
        for row in rows
        if row["implementation"] == OURS and mode in row
    }
    if points:
        axes.plot(
            list(points),
            list(points.values()),
            color="#D55E00",
            linewidth=1,
            linestyle=(0, (6, 2)),
            label="ceiling",
            zorder=1,
        )


def _finish(axes: Any, title: str, x: str, y: str, ticks: list[float], log_x: bool = True) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    if log_x:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    ticks = sorted(set(ticks))
    labels = [
        f"{tick / 1024:g}k" if tick >= 1024 and tick % 1024 == 0 else f"{tick:g}" for tick in ticks
    ]
    crowded = any(b < 1.3 * a for a, b in itertools.pairwise(ticks)) and log_x
    if crowded or len(ticks) > 4:
        axes.set_xticks(ticks, labels, rotation=40 if crowded else 30, ha="right")
    else:
        axes.set_xticks(ticks, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)


def _legend(figure: Any) -> None:
    """Draw one legend for all panels, with one entry for lines that look the same."""
    entries: dict[Any, tuple[Any, str]] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            entries.setdefault(style_of(label) if label in STYLES else label, (handle, label))
    order = sorted(
        entries.values(), key=lambda entry: (not entry[1].startswith(OURS), entry[1] == "ceiling")
    )
    figure.legend(
        *zip(*order),
        loc="outside lower center",
        ncols=min(len(order), 6),
        fontsize=9,
        frameon=False,
    )


# Op, the size that varies, the sizes that are fixed, title.
PANELS: list[tuple[str, str, dict[str, Any], str]] = [
    ("rms_norm", "width", {"rows": 16384}, "RMSNorm, 16384 rows"),
    ("rms_norm", "rows", {"width": 4096}, "RMSNorm, width 4096"),
    ("add_rms_norm", "width", {"rows": 16384}, "add + RMSNorm, 16384 rows"),
    ("add_rms_norm", "rows", {"width": 4096}, "add + RMSNorm, width 4096"),
    ("layer_norm", "width", {"rows": 16384}, "LayerNorm, 16384 rows"),
    ("layer_norm", "rows", {"width": 4096}, "LayerNorm, width 4096"),
    ("add_layer_norm", "width", {"rows": 16384}, "add + LayerNorm, 16384 rows"),
    ("add_layer_norm", "rows", {"width": 4096}, "add + LayerNorm, width 4096"),
    ("swiglu", "rows", {"width": 14336}, "SwiGLU, width 14336"),
    ("geglu", "rows", {"width": 9216}, "GeGLU (tanh), width 9216"),
    ("geglu_erf", "rows", {"width": 9216}, "GeGLU (erf), width 9216"),
    ("rope", "seq", {"batch": 1, "heads": 32}, "RoPE, 32 + 8 heads of 128"),
    ("qk_norm_rope", "seq", {"batch": 1, "heads": 32}, "q/k norm + RoPE, 32 + 8 heads of 128"),
    ("norm_linear", "rows", {"width": 4096}, "add + RMSNorm + linear, 4096 to 28672"),
    ("norm_qkv_rope", "seq", {"width": 4096}, "add + RMSNorm + qkv + RoPE, 4096"),
    ("glu_linear", "rows", {"width": 14336}, "SwiGLU + linear, 14336 to 4096"),
    ("cross_entropy", "vocab", {"rows": 8192}, "cross entropy, 8192 rows"),
    ("cross_entropy", "rows", {"vocab": 128256}, "cross entropy, vocabulary 128256"),
]
AXES = {"rows": "rows", "width": "width", "seq": "tokens in a row", "vocab": "vocabulary"}


def draw_ops(result: Row, path: Path) -> None:
    """Draw the time of every op except the heads, with one panel per varying size.

    A panel needs at least two sizes. If there is no panel, no file is written.
    """
    panels = []
    for op, x, fixed, title in PANELS:
        rows = select(result, op, x, fixed)
        ticks = sorted({row["sizes"][x] for row in rows if BOTH in row})
        if len(ticks) > 1:
            panels.append((rows, x, title, ticks))
    if not panels:
        return
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure = _figure(lines, columns)
    for place, (rows, x, title, ticks) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        _lines(axes, rows, x, lambda row: row[BOTH]["ms"])
        _floor(axes, rows, x, BOTH)
        _finish(axes, title, AXES[x], "ms", ticks)
    _legend(figure)
    environment = result["environment"]
    figure.suptitle(
        f"Forward + backward, bf16: time ({environment['gpu']}, torch {environment['torch']})"
    )
    figure.savefig(path, dpi=110)


def draw_linear_cross_entropy(result: Row, path: Path) -> None:
    """Draw the head's time and scratch over tokens, vocabulary, ignored share and budget."""
    if not any(
        row["op"].startswith("linear_cross_entropy") and BOTH in row for row in result["rows"]
    ):
        return
    columns: list[tuple[str, dict[str, Any], str, str]] = [
        ("rows", {"width": 2048, "vocab": 128256}, BOTH, "width 2048, vocabulary 128256"),
        ("vocab", {"rows": 8192, "width": 2048}, BOTH, "8192 tokens, width 2048"),
        ("width", {"rows": 8192, "vocab": 128256}, BOTH, "8192 tokens, vocabulary 128256"),
        ("rows", {"width": 2048, "vocab": 128256}, FORWARD, "forward only (evaluation)"),
    ]
    figure = _figure(2, len(columns) + 1)
    for line, quantity in enumerate(("ms", "scratch GB")):
        for column, (x, fixed, mode, title) in enumerate(columns, 1):
            axes = figure.add_subplot(2, len(columns) + 1, line * (len(columns) + 1) + column)
            rows = select(result, "linear_cross_entropy", x, fixed)
            rows = [row for row in rows if mode in row]
            _lines(axes, rows, x, lambda row, m=mode, q=quantity: row[m][q])
            if quantity == "ms":
                _floor(axes, rows, x, mode)
            name = "tokens" if x == "rows" else AXES[x]
            _finish(axes, title, name, quantity, [row["sizes"][x] for row in rows])
    _draw_ignored(figure.add_subplot(2, len(columns) + 1, len(columns) + 1), result)
    _draw_budget(figure.add_subplot(2, len(columns) + 1, 2 * (len(columns) + 1)), result)
    _legend(figure)
    environment = result["environment"]
    figure.suptitle(
        "Linear cross entropy, bf16, forward + backward unless noted: time, and scratch beyond "
        f"inputs, outputs and gradients ({environment['gpu']}, torch {environment['torch']})"
    )
    figure.savefig(path, dpi=110)


def _draw_ignored(axes: Any, result: Row) -> None:
    rows = select(result, "linear_cross_entropy_ignored", "ignored", {})
    _lines(axes, rows, "ignored", lambda row: row[BOTH]["ms"])
    _floor(axes, rows, "ignored", BOTH)
    shares = [row["sizes"]["ignored"] for row in rows]
    _finish(axes, "8192 x 4096 x 128256", "share of ignored targets", "ms", shares, log_x=False)


def _draw_budget(axes: Any, result: Row) -> None:
    """Plot time over measured scratch: one point per budget, and one per peer."""
    sizes = {"rows": 8192, "width": 4096, "vocab": 128256}
    for row in result["rows"]:
        if (
            row["op"] == "linear_cross_entropy"
            and row["sizes"] == sizes
            and BOTH in row
            and row["implementation"] != OURS
        ):
            colour, _, marker = style_of(row["implementation"])
            axes.plot(row[BOTH]["scratch GB"], row[BOTH]["ms"], marker, color=colour, markersize=5)
    ours = [
        row for row in result["rows"] if row["op"] == "linear_cross_entropy_budget" and BOTH in row
    ]
    ours.sort(key=lambda row: row[BOTH]["scratch GB"])
    points = [(row[BOTH]["scratch GB"], row[BOTH]["ms"]) for row in ours]
    if points:
        colour, dashes, marker = style_of(OURS)
        axes.plot(*zip(*points), color=colour, linestyle=dashes, marker=marker, linewidth=2.6)
    for place, (row, point) in enumerate(zip(ours, points)):
        budget = row["sizes"]["max_scratch_bytes"]
        name = "default" if budget is None else f"{budget >> 20} MiB"
        offset = (-14, -14) if budget is None else (-10, 8) if place % 2 == 0 else (-34, -12)
        axes.annotate(name, point, textcoords="offset points", xytext=offset, fontsize=7)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_ylim(bottom=0)
    axes.set_title("8192 x 4096 x 128256, by budget", fontsize=10)
    axes.set_xlabel("scratch GB, measured", fontsize=9)
    axes.set_ylabel("ms", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)


def write_all(result: Row, folder: Path) -> None:
    """Write ops.md, and the plots of the ops that were measured at several sizes."""
    (folder / "ops.md").write_text(markdown(result))
    draw_ops(result, folder / "ops_time.png")
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
    """Time and memory of a training step as bars, each with its name and its value.

    The bars of a workload are relative to transformers, so that workloads of any size fit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workloads = step_bars(folder)
    figure = Figure(figsize=(10, 1.2 * len(workloads) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    quantities = (
        ("ms", "Time of a training step", "{:.0f} ms"),
        ("peak GiB", "Peak GPU memory", "{:.1f} GiB"),
    )
    places = [5 * number + bar for number in range(len(workloads)) for bar in range(len(BARS))]
    for axes, (quantity, title, text) in zip(panels, quantities):
        for number, (workload, rows) in enumerate(workloads):
            for bar, row in enumerate(rows):
                name, place = row["implementation"], 5 * number + bar
                share = row[quantity] / rows[0][quantity]
                axes.barh(place, share, height=0.86, color=BARS[name])
                weight = "bold" if name == OURS else "normal"
                axes.text(
                    share + 0.02,
                    place,
                    text.format(row[quantity]),
                    va="center",
                    fontsize=10,
                    fontweight=weight,
                )
            if axes is panels[0]:
                axes.text(0, 5 * number - 0.75, workload, fontsize=11, va="bottom")
        axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=14)
        axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.margins(x=0.16)
        axes.set_xlim(left=0)
    panels[0].set_yticks(places, list(BARS) * len(workloads), fontsize=10)
    panels[0].invert_yaxis()
    for label in panels[0].get_yticklabels():
        if label.get_text() == OURS:
            label.set_fontweight("bold")
    gpu = json.loads((folder / STEPS[0][0]).read_text())["environment"]["gpu"]
    figure.supxlabel(f"Shorter is better. One {gpu}, bf16, AdamW.", fontsize=10, color="#444444")
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
