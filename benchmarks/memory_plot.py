"""Tabulate and draw memory.json, without a GPU: python -m benchmarks.memory_plot [--results FOLDER]

This writes memory.md and memory.png beside memory.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, table
from benchmarks.memory_works import GIB, HF, LIGER, OURS

Row = dict[str, Any]

PLANS = f"{OURS}, planned"
UNPLANNED_HOST_GIB = 0.01  # PyTorch pins some bytes in any step
# The colours are those of the other plots: see benchmarks/plots.py.
STYLES = {HF: ("#999999", "s"), LIGER: ("#E69F00", "D"), OURS: ("#D55E00", "o")}


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


def levels_table(rows: list[Row]) -> str:
    """Return the table of what a layer keeps at each level and what that costs."""
    lines = []
    for row in rows:
        line = {"level": row["level"]}
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
    columns = ["level", "KiB per token and layer", "in host memory", "ms of a layer", "extra ms"]
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
    for (gpu,), rows in groups(result.get("levels", []), "gpu").items():
        parts.append(f"## Levels, on {gpu}\n\n{levels_table(rows)}\n")
    for (gpu, work), rows in groups(result.get("recipes", []), "gpu", "work").items():
        parts.append(f"## Optimizers, {work}, on {gpu}\n\n{recipes_table(rows)}\n")
    for (gpu,), rows in groups(result.get("times", []), "gpu").items():
        parts.append(f"## Predicted times, on {gpu}\n\n{times_table(rows)}\n")
    for (gpu,), rows in groups(result.get("predictions", []), "gpu").items():
        texts = prediction_text(rows), prediction_table(rows)
        parts.append(f"## Predicted peaks, on {gpu}\n\n{texts[0]}\n\n{texts[1]}\n")
    return "\n".join(parts)


def kinds(name: str, rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of an implementation by the labels of their points."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["implementation"] == name:
            label = PLANS if row["keeps"] == "plan" else name
            host = ", with host memory" * (row["host GiB"] > UNPLANNED_HOST_GIB)
            found.setdefault(label + host, []).append(row)
    return found


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw tokens/s against the measured peak: one panel for each work and GPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in result.get("rows", []) if "error" not in row]
    # Less than three points show no curve; the table has them.
    panels = {key: rows for key, rows in groups(measured, "gpu", "work").items() if len(rows) > 2}
    if not panels:
        return
    figure, axes = pyplot.subplots(
        -(-len(panels) // 2), 2, figsize=(11, 4.2 * -(-len(panels) // 2)), layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, ((gpu, work), rows) in zip(axes.flat, panels.items()):
        for name, (color, marker) in STYLES.items():
            for label, own in kinds(name, rows).items():
                face = "none" if label.endswith("host memory") else color
                shape = marker if label.startswith(PLANS) or name != OURS else "^"
                # Only the plans without host memory are one family of settings, and are joined.
                line = "-" if label == PLANS else "none"
                points = sorted((row["peak GiB"], row["tokens/s"]) for row in own)
                style = {"marker": shape, "markerfacecolor": face, "linestyle": line}
                axis.plot(*zip(*points), color=color, label=label, **style)
        axis.set(title=f"{work}\n{gpu}", xlabel="peak of allocated memory, GiB", ylabel="tokens/s")
        axis.set_ylim(0, 1.1 * max(row["tokens/s"] for row in rows))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of memory.json")
    folder = parser.parse_args(arguments).results
    result = json.loads((folder / "memory.json").read_text())
    (folder / "memory.md").write_text(page(result))
    draw(result, folder / "memory.png")


if __name__ == "__main__":
    main()
