"""The predictions of docs/scaling.md are those of docs/scaling.py, and agree with two GPUs."""

from __future__ import annotations

import pytest

from docs import scaling
from docs.scaling import Layout


def test_the_page_has_the_tables_of_the_script() -> None:
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.drawn(page) == page, "run python docs/scaling.py"


@pytest.mark.parametrize("name", scaling.CHECKS)
def test_predictions_agree_with_two_gpus(name: str) -> None:
    ms, measured_ms, gib, measured_gib = scaling.checks()[name]
    assert ms == pytest.approx(measured_ms, rel=0.01)
    assert 0.92 * measured_gib < gib < measured_gib


def test_the_weights_are_those_of_the_models() -> None:
    assert scaling.Sizes.of("llama-3-8b").all == pytest.approx(8.03e9, rel=1e-3)
    assert scaling.Sizes.of("llama-3-70b").all == pytest.approx(70.55e9, rel=1e-3)


def test_more_ranks_take_less_memory_and_no_less_time() -> None:
    layouts = [Layout(shard=ranks) for ranks in scaling.GPUS]
    gib = [scaling.peak_gib("llama-3-70b", each, scaling.ROW) for each in layouts]
    seconds = [scaling.step_seconds("llama-3-70b", each, scaling.ROW) for each in layouts]
    assert gib == sorted(gib, reverse=True)
    assert seconds[1:] == sorted(seconds[1:])
    assert scaling.ranking("llama-3-70b", 8, 1.0) == []


def test_every_layout_uses_all_gpus() -> None:
    for gpus in scaling.GPUS:
        assert {layout.gpus for layout in scaling.layouts(gpus)} == {gpus}
