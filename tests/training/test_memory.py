"""The memory plan of a run: what is planned for, and what the command line says of it."""

from __future__ import annotations

import pytest
import torch

from ligermodels import ConfigError, LigerLlama
from ligermodels.memory.rates import gpu_bytes
from ligermodels.training.memory import outlook, planner, summary, weight_dtype
from tests.training.tiny_run import tiny_config


def model(precision: str) -> LigerLlama:
    with torch.device("meta"):
        return LigerLlama(tiny_config()).to(weight_dtype(precision))


def test_precision_and_accumulation_count() -> None:
    pytest.importorskip("triton")
    weights = sum(p.numel() for p in model("bf16").parameters())
    peaks = {}
    for precision, size in (("bf16", 2), ("bf16-mixed", 4), ("float32", 4)):
        given = model(precision)
        for accumulates in (False, True):
            run = planner(given, "1GiB", precision=precision, accumulates=accumulates)
            said = run.plan(8, 512).prediction
            assert said is not None and said.optimizer_bytes == 2 * size * weights
            peaks[precision, accumulates] = said.peak_bytes
        assert peaks[precision, True] >= peaks[precision, False]
    assert peaks["bf16", False] < peaks["bf16-mixed", False] < peaks["float32", False]


def test_the_summary_is_one_line() -> None:
    run = planner(model("float32"), "1GiB", precision="float32")
    text = summary(run.plan(2, 64))
    assert "\n" not in text
    assert text.startswith("2 layers keep all; predicted peak 0.")
    assert text.endswith("of 1.00 GiB for 2 x 64 tokens")


def test_an_outlook_needs_no_gpu_and_no_weights() -> None:
    pytest.importorskip("triton")
    found = outlook(LigerLlama, tiny_config(), 8, 64, gpu="H200")
    assert found.plan is not None and found.budget == gpu_bytes("H200")
    assert found.rates == "data sheet of H200" and found.largest_batch > 8
    tight = outlook(LigerLlama, tiny_config(), 8, 64, gpu="H200", budget=str(found.least_bytes))
    assert tight.plan is not None and tight.largest_batch >= 8
    less = outlook(LigerLlama, tiny_config(), 8, 64, gpu="H200", budget=str(found.least_bytes - 1))
    assert less.plan is None and less.largest_seq <= 64
    with pytest.raises(ConfigError, match="gpu: 'abacus' is not known"):
        outlook(LigerLlama, tiny_config(), 8, 64, gpu="abacus")
