"""Test that the losses that are measured build and agree, and how they are measured."""

from __future__ import annotations

import json
import time
from argparse import Namespace

import pytest
import torch

from benchmarks import losses
from benchmarks.cases import Absent, Random
from benchmarks.cases.token_losses import LOSSES, PRODUCTS
from benchmarks.common import RESULTS
from benchmarks.losses import (
    COLUMNS,
    MODE,
    longest_kernels,
    loss_table,
    measure_loss,
    product_share,
    replaced,
    shown,
    time_limit,
)
from tests import markdown
from tests.benchmarks.test_cases import assert_agree, outcome


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_implementation_computes_the_same(loss, softcap, monkeypatch) -> None:
    """TRL's code is compared where it is installed. Liger's has no CPU path for some losses."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = LOSSES[loss].build(
        Random("cpu", torch.float32), rows=64, width=32, vocab=96, softcap=softcap
    )
    inputs = case.inputs()
    if loss == "medusa":  # the module reads its own parameters
        outputs = {
            name: case.implementation(name).function(*inputs)
            for name in ("eager", "torch.compile", "ligermodels")
        }
        for out in outputs.values():
            torch.testing.assert_close(out, outputs["eager"])
        return
    names = [x for x in case.implementations if x.startswith(("ligermodels", "trl"))]
    expected = outcome(case, "eager" if "eager" in case.implementations else names[0], inputs)
    for name in names:
        try:
            assert_agree(outcome(case, name, inputs), expected, 1e-4)
        except Absent:
            assert name == "trl"


def test_a_table_has_a_line_for_each_implementation() -> None:
    sizes = {"rows": 8192, "width": 4096, "vocab": 128256, "softcap": None}
    capped = {"rows": 8192, "width": 3584, "vocab": 256000, "softcap": 30.0}
    figures = {"ms": 38.44, "scratch GB": 2.1}
    rows = [
        {"op": "jsd", "sizes": sizes, "implementation": "ligermodels"}
        | {MODE: figures | {"products": 0.937}},
        {"op": "jsd", "sizes": sizes, "implementation": "liger (kernel)"}
        | {MODE: figures | {"ms": 1846.0}},
        {"op": "jsd", "sizes": capped, "implementation": "liger (kernel without the cap)"}
        | {MODE: figures},
        {"op": "dpo", "sizes": sizes, "implementation": "eager", "error": "out of memory"},
    ]
    assert loss_table(rows, "8192 x 4096 x 128256").splitlines() == [
        "| implementation | dpo | jsd |",
        "| --- | --- | --- |",
        "| liger (kernel) |  | 1850, 2.1 |",
        "| eager | out of memory |  |",
        "| ligermodels |  | 38.4, 2.1, 94% |",
    ]
    assert "| liger (kernel) |  | 38.4, 2.1 * |" in loss_table(rows, "8192 x 3584 x 256000")


def test_the_tables_of_the_docs_are_those_of_the_committed_run() -> None:
    rows = json.loads((RESULTS / "losses.json").read_text())["rows"]
    page = (markdown.ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    for size in ("8192 x 4096 x 128256", "8192 x 3584 x 256000"):
        assert loss_table(rows, size) in page


def test_a_row_of_the_table() -> None:
    row = {"op": "dpo", "sizes": LOSSES["dpo"].small, "implementation": "eager"}
    assert shown(row | {"error": "absent"})["ms"] == "absent"
    assert shown(row | {MODE: {"ms": 2.0, "of floor": 0.5}})["of floor"] == 0.5
    assert {"loss", "rows", "vocab", "implementation"} <= set(COLUMNS) and PRODUCTS["jsd"][0] == 2


def test_rows_that_are_measured_again() -> None:
    one, other = ({"op": "dpo", "sizes": {"rows": n}, "implementation": "eager"} for n in (1, 2))
    assert replaced([one, other], [one | {"error": "absent"}]) == [other, one | {"error": "absent"}]


def test_the_kernels_of_a_row() -> None:
    kernels = {"nvjet_sm90_tst_128x256": 8.0, "_rows_kernel": 1.5, "splitKreduce_kernel": 0.5}
    assert product_share(kernels) == 0.85
    row = {"op": "dpo", "sizes": LOSSES["dpo"].small, "implementation": "ligermodels"}
    line = longest_kernels(row | {MODE: {"kernels": kernels}}, count=2)
    assert line == "dpo 512 x 1024 ligermodels, ms: nvjet_sm90_tst_128x256 8.00, _rows_kernel 1.50"


def test_a_block_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(TimeoutError, match="stopped after 0 s"), time_limit(0.01):
        time.sleep(5)
    with time_limit(5):
        pass


def test_one_loss_is_measured_into_a_file(monkeypatch, tmp_path, capsys) -> None:
    """What needs a GPU is replaced: clocks and counts of memory."""
    monkeypatch.setattr(losses, "Random", lambda: Random("cpu", torch.float32))
    monkeypatch.setattr(losses, "steady_time", lambda run: {"ms": 2.0})
    monkeypatch.setattr(losses, "peak_bytes", lambda run: len(run()) * 10**9)
    monkeypatch.setattr(losses, "release_memory", lambda: None)
    monkeypatch.setattr("benchmarks.ops.release_memory", lambda: None)
    monkeypatch.setattr(losses, "kernel_times", lambda run: {"gemm": 9.0, "other": 1.0})
    size = {"rows": 64, "width": 8, "vocab": 32, "softcap": None}
    monkeypatch.setattr(LOSSES["dpo"], "small", size)
    part = tmp_path / "dpo.json"
    arguments = Namespace(small=True, without=["torch.compile", "liger"], alone=[], limit=60)
    measure_loss("dpo", [0], part, arguments)
    rows = {row["implementation"]: row for row in json.loads(part.read_text())["rows"]}
    assert list(rows)[:2] == ["ligermodels", "ligermodels (log_probs)"] and len(rows) == 4
    assert rows["ligermodels"][MODE]["products"] == 0.9
    assert rows["eager"][MODE]["of floor"] == 1.0 and "products" not in rows["eager"][MODE]
    assert "| dpo | 64 | 32 | eager | 2 | 1 |" in capsys.readouterr().out
