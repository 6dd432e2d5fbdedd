"""Tests of tables and plots with an invented result, which has every size of every op."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import plots
from benchmarks.cases import OPS, Random
from benchmarks.common import RESULTS


def timing(ms: float, op: str) -> dict:
    return {
        "ms": ms,
        "low ms": 0.9 * ms,
        "high ms": 1.1 * ms,
        "repeats": 5,
        "method": "graph",
        "floor ms": 0.5,
        "share": 0.5 / ms,
        "peak GB": 0.1 * ms,
        "scratch GB": 0.02 * ms,
    }


@pytest.fixture(scope="module")
def result() -> dict:
    """An invented result: the n-th implementation takes n + 2 ms, and ours takes 1 ms."""
    rows = []
    for op, entry in OPS.items():
        names = list(entry.build(Random("cpu"), **entry.small).implementations)
        for place, name in enumerate(names):
            ms = 1.0 if name == plots.OURS else place + 2.0
            for size in entry.table + entry.sweep:
                row = {"op": op, "sizes": size, "implementation": name}
                if name == "torch linear_cross_entropy":
                    row["error"] = "absent: torch 2.11.0 has no F.linear_cross_entropy"
                else:
                    row["forward + backward"] = timing(ms, op)
                    row["forward"] = timing(ms / 2, op)
                rows.append(row)
            if entry.host:
                host = {"op": op, "sizes": entry.small, "implementation": name, "host": True}
                rows.append(host | {"host us": 100.0 * ms})
    ops = {op: {"copy GB/s": 4000.0, "seconds": 1.0} for op in OPS}
    ops["rope"]["error"] = "stopped after 150 s"
    versions = {"gpu": "NVIDIA H200", "torch": "2.11.0", "liger-kernel": "0.8.5"}
    # The plots read the result from a JSON file.
    return json.loads(json.dumps({"environment": versions, "ops": ops, "rows": rows}))


def lines_of(table: str) -> list[dict[str, str]]:
    header, _, *body = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    )
    return [dict(zip(header, line)) for line in body]


def test_the_table_has_a_line_for_each_size_and_a_cell_for_each_peer(result):
    lines = lines_of(plots.op_table(result, "forward + backward"))
    assert len(lines) == sum(len(entry.table) for entry in OPS.values())
    first = lines[0]
    assert first == {
        "op": "RMSNorm",
        "size": "16384 x 2048",
        "eager": "2",
        "torch.compile": "4",
        "Liger": "5, 6 (in place)",
        "other peers": "3 (F.rms_norm)",
        "ligermodels": "**1**",
        "share of ceiling": "50%",
        "host us, ours / Liger": "100 / 500",
    }
    by_size = {(line["op"], line["size"]): line for line in lines}
    head = by_size["linear CE", "8192 x 4096 x 128256"]
    assert head["other peers"].startswith("absent (torch linear_cross_entropy), 7 (cce, filtered)")
    assert head["Liger"] == "5 (bf16 sum), 6 (float32 sum)"
    assert ("linear log-probs", "8192 x 4096 x 128256, entropy") in by_size
    assert by_size["add + LayerNorm", "16384 x 4096"]["Liger"] == ""


def test_the_forward_table_has_forward_times_and_no_host_column(result):
    first = lines_of(plots.op_table(result, "forward"))[0]
    assert first["eager"] == "1" and first["ligermodels"] == "**0.5**"
    assert first["share of ceiling"] == "100%"
    assert "host us, ours / Liger" not in first


def test_what_is_of_another_run_is_named(result):
    ops = {op: {"run": "2030-01-01 12:00"} for op in ("rope", "swiglu", "host")}
    assert plots.other_runs({**result, "ops": ops}) == []
    ops |= {"layer_norm": {"run": "2030-01-02 12:00"}, "host": {"run": "2030-01-02 12:00"}}
    ops |= {"rms_norm": {"run": "2030-01-01 12:00"}, "geglu": {}}
    text = plots.markdown({**result, "ops": ops})
    assert "\nAnother run (2030-01-02 12:00) measured: host times, LayerNorm.\n" in text
    assert "\nAnother run (an earlier one) measured: GeGLU (tanh).\n" in text
    assert text.count("Another run") == 2


def test_failures_are_shown_and_an_op_without_rows_is_left_out(result):
    rows = [dict(row) for row in result["rows"] if row["op"] in ("rms_norm", "swiglu")]
    for row in rows:
        if row["implementation"] == "eager":
            row.pop("forward + backward", None)
            row["error"] = "out of memory"
        if row["op"] == "swiglu" and row["implementation"] == plots.OURS:
            row.pop("forward + backward", None)
            row["error"] = "failed: ValueError: no"
    lines = lines_of(plots.op_table({**result, "rows": rows}, "forward + backward"))
    assert [line["op"] for line in lines] == ["RMSNorm"] * 3 + ["SwiGLU"]
    assert lines[0]["eager"] == "out of memory"
    assert lines[3]["ligermodels"] == "failed" and lines[3]["share of ceiling"] == ""


def test_the_text_names_the_machine_the_ceilings_and_what_is_missing(result):
    text = plots.markdown(result)
    assert text.startswith(
        "NVIDIA H200; torch 2.11.0, liger-kernel 0.8.5. In the same run a copy moves 4000 GB/s, "
    )
    assert "not complete: rope: stopped after 150 s." in text
    # The ceiling is three products of 2 * rows * width * vocabulary FLOP in 0.5 ms.
    least, most = (6 * size / 0.5 / 1e9 for size in (8192 * 4096 * 128256, 32768 * 4096 * 128256))
    assert f"alone run at {least:.0f} to {most:.0f} TFLOP/s." in text


def test_every_implementation_has_a_style(result):
    assert {row["implementation"] for row in result["rows"]} == plots.STYLES.keys()


@pytest.mark.parametrize("panel", plots.PANELS, ids=lambda panel: panel[3])
def test_every_panel_has_several_points_and_one_size_of_the_rest(result, panel):
    op, x, fixed, _ = panel
    rows = [row for row in plots.select(result, op, x, fixed) if row["implementation"] == "eager"]
    points = [row["sizes"][x] for row in rows]
    assert len(points) >= 4 and points == sorted(set(points))
    assert len({tuple(v for name, v in row["sizes"].items() if name != x) for row in rows}) == 1


def test_plots_are_drawn_from_the_file_alone(result, tmp_path, monkeypatch, capsys):
    (tmp_path / "ops.json").write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", ["plots", "--results", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plots.main()
    assert (tmp_path / "ops.md").read_text() == plots.markdown(result)
    for name in ("ops_time.png", "ops_memory.png", "linear_ce.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 50_000
    assert "| RMSNorm |" in capsys.readouterr().out


def test_a_run_of_the_table_alone_is_drawn_too(result, tmp_path):
    rows = [row for row in result["rows"] if row["sizes"] in OPS[row["op"]].table]
    plots.write_all({**result, "rows": rows}, tmp_path)
    assert (tmp_path / "linear_ce.png").exists()


def test_one_op_alone_is_drawn_without_the_others(result, tmp_path):
    rows = [row for row in result["rows"] if row["op"] == "rope"]
    plots.write_all({**result, "rows": rows}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "ops.md",
        "ops_time.png",
        "ops_memory.png",
    }
    assert "TFLOP/s" not in (tmp_path / "ops.md").read_text()


def test_the_picture_of_the_steps_is_drawn_from_the_committed_results(tmp_path):
    workloads = plots.step_bars(RESULTS)
    assert [len(rows) for _, rows in workloads] == [3, 3, 3]
    for _, rows in workloads:
        assert [row["implementation"] for row in rows] == list(plots.BARS)
    plots.draw_steps(RESULTS, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
