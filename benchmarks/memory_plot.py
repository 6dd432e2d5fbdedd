"""Tabulate and draw memory.json, without a GPU: python -m benchmarks.memory_plot [--results FOLDER]

This writes memory.md and memory.png beside memory.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.colours import COLOURS
from benchmarks.common import RESULTS, table
from benchmarks.memory_works import GIB, HF, LIGER, OURS
from ligermodels.pictures import picture

Row = dict[str, Any]

STYLES = {HF: (COLOURS[HF], "s"), LIGER: (COLOURS["liger"], "D"), OURS: (COLOURS[OURS], "o")}


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


# The work of memory.png, and a label of each setting, with its offset from the point.
WORK, GPU = "llama-3-8b, 8 x 2048, AdamW", "NVIDIA H200"
LABELS: dict[str, tuple[str, tuple[int, int]]] = {
    f"{HF}: every block checkpointed": ("every block recomputed", (9, 0)),
    f"{LIGER}: every block checkpointed": ("every block recomputed", (9, 3)),
    f"{LIGER}: 16 blocks checkpointed": ("16 of 32 blocks recomputed", (9, 3)),
    f"{LIGER}: nothing recomputed": ("nothing recomputed", (-4, -16)),
    f"{OURS}: plan for 61.5 GiB": ("plan for 61.5 GiB", (9, 5)),
    f"{OURS}: plan for 70 GiB": ("70 GiB", (-8, -13)),
    f"{OURS}: plan for 80 GiB": ("80 GiB", (-8, -13)),
    f"{OURS}: plan for 90 GiB": ("90 GiB", (-8, -13)),
    f"{OURS}: plan for auto": ("all memory", (-4, -15)),
    f"{OURS}: plan for 61.5 GiB and 32 GiB of host memory": (
        "61.5 GiB + 32 GiB host",
        (9, -4),
    ),
}


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw the time of a step against its peak of memory: one work, whose settings are named.

    Lines connect the settings of a library that need no host memory.
    """
    found = {
        row["setting"]: row
        for row in result.get("rows", [])
        if (row["work"], row["gpu"]) == (WORK, GPU) and "error" not in row
    }
    if not LABELS.keys() <= found.keys():
        return
    with picture(9.5, 5.4) as figure:
        axes = figure.add_subplot()
        for name, (colour, marker) in STYLES.items():
            rows = [
                found[setting] for setting in LABELS if found[setting]["implementation"] == name
            ]
            rows.sort(key=lambda row: row["peak GiB"])
            line = [row for row in rows if "host memory" not in row["setting"]]
            for those, style in ((line, "-"), (rows, marker)):
                points = [(row["peak GiB"], row["ms"] / 1000) for row in those]
                axes.plot(*zip(*points), style, color=colour, markersize=9)
            axes.plot([], [], marker, color=colour, label=name, markersize=9)
        for setting, (text, (right, up)) in LABELS.items():
            row = found[setting]
            axes.annotate(
                text,
                (row["peak GiB"], row["ms"] / 1000),
                textcoords="offset points",
                xytext=(right, up),
                ha="left" if right > 0 else "right" if right < -4 else "center",
                va="center",
                size=9,
                color=STYLES[row["implementation"]][0],
            )
        axes.set(xlabel="peak of allocated memory, GiB", ylabel="seconds of a training step")
        axes.margins(x=0.16, y=0.1)
        axes.grid()
        axes.legend()
        axes.set_title("A plan takes less time in the same memory", weight="bold")
        figure.supxlabel(f"{WORK}, on one {GPU}. Lower is faster, further left is leaner.", size=9)
        figure.savefig(file, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of memory.json")
    folder = parser.parse_args(arguments).results
    result = json.loads((folder / "memory.json").read_text())
    (folder / "memory.md").write_text(page(result))
    draw(result, folder / "memory.png")


if __name__ == "__main__":
    main()
