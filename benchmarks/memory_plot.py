"""Tabulate and draw memory.json, without a GPU: python -m benchmarks.memory_plot [--results FOLDER]

This writes memory.md and memory.png beside memory.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import COLOURS, RESULTS, table
from benchmarks.memory_works import GIB, HF, LIGER, OURS

Row = dict[str, Any]

STYLES = {HF: (COLOURS[HF], "s"), LIGER: (COLOURS["liger"], "D"), OURS: (COLOURS[OURS], "o")}
# Where a label may be: its offset from the point, and which of its sides is there. The best first.
PLACES = [
    ((8, 0), "left", "center"),
    ((-8, 0), "right", "center"),
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    *(((8, y), "left", "center") for y in (11, -11, 22, -22, 33, -33)),
    *(((-8, y), "right", "center") for y in (11, -11, 22, -22, 33, -33)),
]


def groups(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some fields, in the order of their first rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def work_table(rows: list[Row]) -> str:
    """Return the table of one work on one GPU, with times as shares of Liger's checkpointing."""
    whole = [row for row in rows if row["setting"].endswith(": every block checkpointed")]
    times = [row["ms"] for row in whole if row["setting"].startswith(LIGER) and "ms" in row]
    baseline = min(times, default=None)  # Gemma 2 has one for each kind of attention
    lines = []
    for row in rows:
        line = {"setting": row["setting"]}
        if "error" in row:
            line["ms"] = "out of memory" if "OutOfMemory" in row["error"] else row["error"]
        else:
            line |= {
                "ms": number(row["ms"], 0),
                "tokens/s": number(row["tokens/s"], 0),
                "peak GiB": number(row["peak GiB"]),
                "predicted GiB": number(row.get("predicted GiB")),
                "reserved GiB": number(row["reserved GiB"]),
                "host GiB": number(row["host GiB"]),
            }
            if baseline:
                line["time / Liger's"] = number(row["ms"] / baseline, 3)
        lines.append(line)
    columns = ["setting", "ms", "time / Liger's", "tokens/s", "peak GiB", "predicted GiB"]
    return table(lines, [*columns, "reserved GiB", "host GiB"])


def policies_table(rows: list[Row]) -> str:
    """Return the table of the memory and the time of a layer under each checkpointing policy."""
    lines = []
    for row in rows:
        line = {"policy": row["policy"]}
        if "error" in row:
            line["extra ms"] = row["error"]
        else:
            line |= {
                "KiB per token and layer": number(row["bytes per token"] / 1024),
                "in host memory": number(row["host bytes per token"] / 1024),
                "ms of a layer": number(row["ms of a layer"], 2),
                "extra ms": number(row["extra ms"], 2),
            }
        lines.append(line)
    columns = ["policy", "KiB per token and layer", "in host memory", "ms of a layer", "extra ms"]
    return table(lines, columns)


def recipes_table(rows: list[Row]) -> str:
    """Return the table of what each recipe of examples/optimizer_memory.py holds, and its time."""
    names = ("parameter", "state", "gradient", "peak")
    lines = [
        {"recipe": row["recipe"], "ms": number(row["ms"], 0)}
        | {f"{name} GiB": number(row[f"{name} bytes"] / GIB) for name in names}
        for row in rows
    ]
    return table(lines, ["recipe", *(f"{name} GiB" for name in names), "ms"])


def times_table(rows: list[Row]) -> str:
    """Return the table of predicted times, to which that of the optimizer's step is added."""
    lines = []
    for row in rows:
        predicted = row["predicted ms"] + row["optimizer ms"]
        names = {name: row[name] for name in ("work", "setting")}
        figures = {
            "predicted ms": number(predicted, 0),
            "measured ms": number(row["measured ms"], 0),
        }
        lines.append(names | figures | {"ratio": number(predicted / row["measured ms"], 3)})
    return table(lines, ["work", "setting", "predicted ms", "measured ms", "ratio"])


def prediction_text(rows: list[Row]) -> str:
    """Return how far the predicted peaks are from the measured ones, and which were not measured.

    The ratio is predicted / measured.
    """
    ratios = sorted(row["ratio"] for row in rows if "ratio" in row)
    text = f"{len(ratios)} of {len(rows)} cases were measured."
    if ratios:
        near = sum(0.99 <= ratio <= 1.03 for ratio in ratios)
        text += (
            f" Predicted / measured peak: from {ratios[0]:.4f} to {ratios[-1]:.4f}, median "
            f"{ratios[len(ratios) // 2]:.4f}; {near} are between 0.99 and 1.03."
        )
    return text


def prediction_table(rows: list[Row]) -> str:
    """Return the table of all cases; it says which ones rank 0 ran without the other ranks."""
    lines = [
        {
            "case": row["case"] + ", rank 0 alone" * ("ranks that ran" in row),
            "predicted GiB": number(row.get("predicted GiB"), 3),
            "measured GiB": number(row.get("measured GiB"), 3),
            "ratio": number(row.get("ratio"), 4) or row.get("error", ""),
        }
        for row in rows
    ]
    return table(lines, ["case", "predicted GiB", "measured GiB", "ratio"])


def page(result: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    parts = ["# Memory plans\n"]
    for (gpu, work), rows in groups(result.get("rows", []), "gpu", "work").items():
        parts.append(f"## {work}, on {gpu}\n\n{work_table(rows)}\n")
    for (gpu,), rows in groups(result.get("policies", []), "gpu").items():
        parts.append(f"## Levels, on {gpu}\n\n{policies_table(rows)}\n")
    for (gpu, work), rows in groups(result.get("recipes", []), "gpu", "work").items():
        parts.append(f"## Optimizers, {work}, on {gpu}\n\n{recipes_table(rows)}\n")
    for (gpu,), rows in groups(result.get("times", []), "gpu").items():
        parts.append(f"## Predicted times, on {gpu}\n\n{times_table(rows)}\n")
    for (gpu,), rows in groups(result.get("predictions", []), "gpu").items():
        texts = prediction_text(rows), prediction_table(rows)
        parts.append(f"## Predicted peaks, on {gpu}\n\n{texts[0]}\n\n{texts[1]}\n")
    return "\n".join(parts)


def short(row: Row) -> str:
    """Return the label of a point: what is computed again, or what the plan may take."""
    name, _, how = row["setting"].partition(": ")
    attention = name.rpartition(", ")[2]
    for full, brief in (
        ("every block checkpointed, without attention", "all but attention recomputed"),
        ("every block checkpointed, but every second product", "half of the products kept"),
        ("every block checkpointed", "all recomputed"),
        ("checkpointed", "recomputed"),
        (" and ", " + "),
        (" of host memory", " host"),
        ("plan for auto", "plan for all memory"),
    ):
        how = how.replace(full, brief)
    return how + f" ({attention})" * (attention in ("eager", "flex_attention"))


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw tokens/s against the measured peak: one panel for each work and GPU.

    Every point has its setting beside it. A work with less than three points has no panel.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    measured = [row for row in result.get("rows", []) if "error" not in row]
    panels = {key: rows for key, rows in groups(measured, "work", "gpu").items() if len(rows) > 2}
    if not panels:
        return
    panels = dict(sorted(panels.items(), reverse=True))  # the same model on two GPUs, side by side
    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(13, 4.6 * lines + 1), layout="constrained")
    FigureCanvasAgg(figure)
    for place, ((work, gpu), rows) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, 2, place)
        for row in rows:
            color, marker = STYLES[row["implementation"]]
            axes.plot(row["peak GiB"], row["tokens/s"], marker, color=color, markersize=8)
        axes.set_title(f"{work}\none {gpu}", fontsize=11)
        axes.set(xlabel="peak of allocated memory, GiB", ylabel="tokens/s")
        axes.margins(x=0.25, y=0.15)
        axes.grid(alpha=0.3)
    figure.suptitle("Higher is faster. Further left takes less memory.", fontsize=12)
    entries = [
        Line2D([], [], color=color, marker=marker, linestyle="none", markersize=8, label=name)
        for name, (color, marker) in STYLES.items()
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)
    figure.draw_without_rendering()  # the labels need the final places of the points
    for axes, rows in zip(figure.axes, panels.values()):
        label_points(axes, rows)
    figure.savefig(file, dpi=110)


def label_points(axes: Any, rows: list[Row]) -> None:
    """Write the setting of each row beside its point, where it covers no point and no label."""
    from matplotlib.transforms import Bbox

    points = axes.transData.transform([(row["peak GiB"], row["tokens/s"]) for row in rows])
    taken = [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    inside = axes.get_window_extent()
    for row in rows:
        for offset, side, height in PLACES:
            label = axes.annotate(
                short(row),
                (row["peak GiB"], row["tokens/s"]),
                textcoords="offset points",
                xytext=offset,
                ha=side,
                va=height,
                fontsize=9,
            )
            box = label.get_window_extent()
            fits = inside.contains(*box.min) and inside.contains(*box.max)
            if fits and not box.count_overlaps(taken):
                taken.append(box)
                break
            label.remove()
        else:
            raise ValueError(f"no room for the label of {row['setting']} in {axes.get_title()!r}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of memory.json")
    folder = parser.parse_args(arguments).results
    result = json.loads((folder / "memory.json").read_text())
    (folder / "memory.md").write_text(page(result))
    draw(result, folder / "memory.png")


if __name__ == "__main__":
    main()
