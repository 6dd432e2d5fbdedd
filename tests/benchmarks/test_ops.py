"""Tests of the benchmark driver, which runs a process for each op and continues if one fails."""

from __future__ import annotations

import collections
import itertools
import json
import sys

import pytest
import torch

from benchmarks import cases, common, ops
from benchmarks.cases import Op, Random
from benchmarks.ops import collect, measure_host, measure_op, replaced, run_workers, turns

PROGRAM = """
import json, pathlib, sys, time
sys.stdin.readline()
pathlib.Path({path!r}).write_text(json.dumps({{"copy GB/s": 1.0, "rows": [{{"op": {op!r}}}]}}))
{ending}
"""


def commands(folder, **endings):
    parts = {op: folder / f"{op}.json" for op in endings}
    return {
        op: [sys.executable, "-c", PROGRAM.format(path=str(parts[op]), op=op, ending=ending)]
        for op, ending in endings.items()
    }, parts


def test_a_crash_is_recorded_and_the_next_op_goes_on(tmp_path):
    to_run, parts = commands(tmp_path, first="", second="raise SystemExit(7)", third="")
    results = dict(run_workers(to_run, parts, timeout=60))
    assert list(results) == ["first", "second", "third"]
    assert "error" not in results["first"] and "error" not in results["third"]
    assert results["second"]["error"] == "its process ended with status 7"
    # The driver keeps the rows that the process wrote before it crashed.
    assert [row["op"] for row in collect(results)["rows"]] == ["first", "second", "third"]
    assert collect(results)["ops"]["second"].keys() == {"copy GB/s", "seconds", "error"}


def test_a_process_that_takes_too_long_is_stopped(tmp_path):
    to_run, parts = commands(tmp_path, slow="time.sleep(600)", next="")
    results = dict(run_workers(to_run, parts, timeout=3))
    assert results["slow"]["error"] == "stopped after 3 s"
    assert results["next"]["rows"] == [{"op": "next"}]


def test_a_process_that_dies_before_its_turn_is_recorded(tmp_path):
    parts = {"op": tmp_path / "op.json", "next": tmp_path / "next.json"}
    to_run = {op: [sys.executable, "-c", "raise SystemExit(1)"] for op in parts}
    results = dict(run_workers(to_run, parts, timeout=60))
    assert all(r["rows"] == [] and r["error"].endswith("status 1") for r in results.values())


def test_processes_take_turns(tmp_path):
    log = tmp_path / "log"
    step = "\n".join(
        [
            f"log = open({str(log)!r}, 'a', buffering=1)",
            "print('in', file=log)",
            "time.sleep(0.1)",
            "print('out', file=log)",
        ]
    )
    to_run, parts = commands(tmp_path, a=step, b=step, c=step)
    dict(run_workers(to_run, parts, timeout=60))
    assert log.read_text().split() == ["in", "out"] * 3


TINY = {
    "rms_norm": ({"rows": 4, "width": 8}, {"rows": 6, "width": 8}),
    "linear_cross_entropy": (
        {"rows": 4, "width": 8, "vocab": 16},
        {"rows": 6, "width": 8, "vocab": 16},
    ),
}


# Each takes seconds, so the default run has one with a plain kernel and one with products.
DEFAULT = ("rms_norm", "linear_cross_entropy")


@pytest.mark.parametrize(
    "op", [op if op in DEFAULT else pytest.param(op, marks=pytest.mark.long) for op in TINY]
)
def test_an_op_is_measured_with_every_implementation(op, tmp_path, monkeypatch, capsys):
    """Everything runs except the clocks, which need a GPU."""
    table, sweep = TINY[op]
    build = cases.OPS[op].build
    monkeypatch.setitem(ops.OPS, op, Op("", build, table, [table], [sweep]))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(ops, "Random", lambda: Random("cpu", torch.float32))
    monkeypatch.setattr(ops, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(ops, "peak_bytes", lambda run: 10**9 if run() is not None else 0)
    timing = {"ms": 2.0, "low ms": 1.0, "high ms": 3.0, "repeats": 5, "method": "graph"}
    monkeypatch.setattr(ops, "device_time", lambda run: timing if run() is not False else {})
    part = tmp_path / "part.json"
    measure_op(op, True, part)
    rows = json.loads(part.read_text())["rows"]
    names = list(build(Random("cpu", torch.float32), **table).implementations)
    assert [row["implementation"] for row in rows] == names * 2
    # The smallest size comes first.
    assert [row["sizes"] for row in rows[:: len(names)]] == [table, sweep]
    for row in rows:
        if row["implementation"].startswith(("liger (", "cce")) or row["implementation"] == "liger":
            # The other libraries are not installed, or they need a GPU.
            assert row["error"].startswith(("absent", "failed"))
        elif row["implementation"] == "torch linear_cross_entropy" and not hasattr(
            torch.nn.functional, "linear_cross_entropy"
        ):
            assert row["error"].startswith("absent")
        else:
            assert "error" not in row
            both = row["forward + backward"]
            assert both["share"] == both["floor ms"] / 2.0
            assert 0.99 < both["scratch GB"] < both["peak GB"] == 1.0
            if row["sizes"] == table:
                assert row["forward"]["floor ms"] < both["floor ms"]
            elif op == "rms_norm":
                assert "forward" not in row
    if op == "rms_norm":  # The floor is 5 passes over 4 x 8 float32 values at 1 GB/s.
        assert rows[0]["forward + backward"]["floor ms"] == pytest.approx(5 * 128 / 1e9 * 1e3)
    else:  # The floor is three matrix products of 2 ms each.
        assert rows[0]["forward + backward"]["floor ms"] == 6.0
    assert "ligermodels: forward 2 ms (graph" in capsys.readouterr().out


def test_of_several_rounds_the_best_counts(tmp_path, monkeypatch):
    """The second round goes in reverse order. The best time of each pass is kept on its own."""
    sizes = TINY["rms_norm"][0]
    build, order, clock = cases.OPS["rms_norm"].build, [], iter(range(100, 0, -1))

    def measure(implementation, random, forward_too):
        order.append(implementation.function)
        ms = next(clock)
        same = {"method": "graph", "scratch GB": 0}
        return {"forward": same | {"ms": 200 - ms}, "forward + backward": same | {"ms": ms}}

    def build_two(*args, **sizes):
        case = build(*args, **sizes)
        case.implementations = {n: case.implementations[n] for n in ("eager", "ligermodels")}
        return case

    monkeypatch.setitem(ops.OPS, "rms_norm", Op("", build_two, sizes, [sizes], [], rounds=2))
    monkeypatch.setattr(ops, "Random", lambda: Random("cpu", torch.float32))
    monkeypatch.setattr(ops, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(ops, "measure", measure)
    measure_op("rms_norm", False, tmp_path / "part.json")
    assert order == [order[0], order[1], order[1], order[0]]
    rows = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["eager", "ligermodels"]
    times = [(row["forward"]["ms"], row["forward + backward"]["ms"]) for row in rows]
    assert times == [(100, 97), (101, 98)]


def test_host_times_of_all_ops(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(ops, "Random", lambda: Random("cpu", torch.float32))
    monkeypatch.setattr(ops, "host_microseconds", lambda run: float(len(run())))
    monkeypatch.setattr(ops, "HOST_ROUNDS", 1)
    # linear_cross_entropy_budget is not measured on the host.
    names = ["rms_norm", "linear_cross_entropy_budget", "swiglu"]
    measure_host(names, tmp_path / "host.json")
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    ours = [row for row in rows if row["implementation"] == "ligermodels"]
    assert [(row["op"], row["host"], row["host us"]) for row in ours] == [
        ("rms_norm", True, 3.0),  # A call returns the output and two gradients.
        ("swiglu", True, 2.0),
    ]
    assert all(row["sizes"] == cases.OPS[row["op"]].small for row in rows)
    absent = [row for row in rows if "error" in row]
    assert absent and all("host us" not in row for row in absent)


def test_host_times_are_of_calls_in_turn(tmp_path, monkeypatch):
    """Each call is slower than the one before. All medians agree, because the calls take turns."""
    order = []

    def microseconds(run):
        order.append(run)
        return float(len(order))

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(ops, "Random", lambda: Random("cpu", torch.float32))
    monkeypatch.setattr(ops, "host_microseconds", microseconds)
    monkeypatch.setattr(ops, "HOST_ROUNDS", 3)
    measure_host(["swiglu"], tmp_path / "host.json")
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    rows = [row for row in rows if "error" not in row]
    assert len(rows) > 2 and len(order) == 3 * ops.HOST_TURNS * len(rows)
    for row in rows:
        assert row["host us"] == pytest.approx(len(order) / 2, abs=len(rows))
        assert row["host low us"] < len(order) / 3 and row["host high us"] > 2 * len(order) / 3


def test_turns_of_the_host():
    calls = [ops.HostCall({"call": i}) for i in range(4)]
    order = [call.row["call"] for call in turns(calls, 200, torch.Generator().manual_seed(0))]
    rounds = [order[i : i + 4] for i in range(0, 800, 4)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in rounds)
    assert all(a != b for a, b in itertools.pairwise(order))
    behind = collections.Counter(itertools.pairwise(order))
    # Among the 799 pairs of neighbours, each call often follows each of the others.
    assert len(behind) == 12 and min(behind.values()) > 40
    only = [ops.HostCall({})]
    assert list(turns(only, 3, torch.Generator())) == only * 3


def test_a_call_of_the_host_that_fails_is_a_row(monkeypatch, capsys):
    def run():
        raise RuntimeError("worn out")

    monkeypatch.setattr(ops, "host_microseconds", lambda run: run())
    call = ops.HostCall({"op": "a"}, run)
    for _ in range(3):
        call.take()
    assert call.result() == {"op": "a", "error": "failed: RuntimeError: worn out"}
    assert capsys.readouterr().err.count("\nRuntimeError: worn out") == 1


def test_what_is_measured_again_takes_its_place():
    def row(op, name, value, **more):
        return {"op": op, "sizes": {"rows": 1}, "implementation": name, "value": value} | more

    earlier = {
        "environment": {"gpu": "A"},
        "ops": {"a": {"seconds": 1}, "b": {"seconds": 2}},
        "rows": [row("a", "x", 1), row("a", "x", 2, host=True), row("b", "x", 3)],
    }
    again = {"environment": {"gpu": "A"}, "ops": {"a": {"seconds": 5}}, "rows": [row("a", "x", 9)]}
    result = replaced(earlier, again)
    assert result["ops"] == {"a": {"seconds": 5}, "b": {"seconds": 2}}
    assert [r["value"] for r in result["rows"]] == [2, 3, 9]
    assert replaced({}, again) is again


def test_scratch_leaves_out_what_is_returned_once(monkeypatch):
    monkeypatch.setattr(ops, "peak_bytes", lambda run: 10_000)
    monkeypatch.setattr(ops, "device_time", lambda run: {})
    x = torch.zeros(100)
    made = torch.zeros(1000)
    # The call returns two views of one storage, and a view of an input.
    row = ops.measure_call(lambda: (made[:10], made[10:], x[3:]), [x])
    assert row["scratch GB"] == pytest.approx((10_000 - 4000) / 1e9)


@pytest.mark.gpu
def test_what_waits_for_the_device_is_timed_without_a_graph():
    x = torch.randn(256, 256, device="cuda")
    assert not common.synchronises(lambda: x @ x)
    assert common.synchronises(lambda: x.sum().item())
    graph, events = common.device_time(lambda: x @ x), common.device_time(lambda: x.sum().item())
    assert (graph["method"], events["method"]) == ("graph", "events")
    for timing in (graph, events):
        assert 0 < timing["low ms"] <= timing["ms"] <= timing["high ms"] < 1000
    torch.randn(3, device="cuda")  # This would raise if the generator were still in capture mode.
