"""Test that the losses that are measured build, and that all implementations agree."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import Absent, Random
from benchmarks.cases.token_losses import LOSSES, PRODUCTS
from benchmarks.losses import COLUMNS, MODE, shown
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


def test_a_row_of_the_table() -> None:
    row = {"op": "dpo", "sizes": LOSSES["dpo"].small, "implementation": "eager"}
    assert shown(row | {"error": "absent"})["ms"] == "absent"
    assert shown(row | {MODE: {"ms": 2.0, "share": 0.5}})["share"] == 0.5
    assert {"loss", "rows", "vocab", "implementation"} <= set(COLUMNS) and PRODUCTS["jsd"][0] == 2
