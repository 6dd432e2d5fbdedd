"""Reading Nsight Compute's CSV."""

from __future__ import annotations

import pytest

from benchmarks.counters import METRICS, calls, parse

HEADER = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def rows(number: int, kernel: str, values: list[str]) -> list[str]:
    return [
        f'"{number}","{kernel}","{metric}","unit","{value}"'
        for metric, value in zip(METRICS, values, strict=True)
    ]


def test_kernels_are_told_apart_by_the_markers() -> None:
    lines = ["==PROF== Connected", HEADER]
    lines += rows(0, "norm_kernel", ["66,000", "134,000,000", "135,000,000", "91.5", "20"])
    lines += rows(1, "spin_kernel(long)", ["1", "0", "0", "0", "0"])
    lines += rows(2, "void other<float>(int)", ["2e3", "1", "2", "3", "4"])
    lines += rows(3, "sum_kernel", ["1000", "5", "6", "7", "8"])
    lines += rows(4, "spin_kernel(long)", ["1", "0", "0", "0", "0"])
    first, second = parse("\n".join(lines))
    assert [kernel["kernel"] for kernel in first] == ["norm_kernel"]
    assert first[0]["ms"] == pytest.approx(0.066)
    assert first[0]["read GB"] == pytest.approx(0.134)
    assert first[0]["memory busy %"] == 91.5
    assert [kernel["kernel"] for kernel in second] == ["void other<float>", "sum_kernel"]


def test_every_op_on_rows_is_called() -> None:
    ops = {op for op, _ in calls()}
    assert {"rms_norm", "rope", "cross_entropy", "qk_norm_rope"} <= ops
    assert not any(op.startswith("linear") for op in ops)
