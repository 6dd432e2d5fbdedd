"""The checks that ops share. The tests of each op hold the messages that its callers see."""

from __future__ import annotations

import pytest
import torch

from ligermodels.kernels.checks import check_count, check_floating, check_row_parameter


class Index:
    """An integer of another library, such as numpy's."""

    def __index__(self) -> int:
        return 3


def test_check_count() -> None:
    assert check_count("op", "heads", 1, 1) == 1
    assert type(check_count("op", "heads", Index(), 0)) is int
    for value in (0, True, 2.0, "3", None, torch.tensor(3)):
        with pytest.raises(ValueError, match="op: heads="):
            check_count("op", "heads", value, 1)


def test_check_floating() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check_floating("op", "x", torch.ones(1, dtype=dtype))
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"op: x is {dtype}"):
            check_floating("op", "x", torch.ones(1).to(dtype))


def test_check_row_parameter() -> None:
    x = torch.ones(2, 3)
    check_row_parameter("op", "weight", torch.ones(3), "x", x)
    for shape in ((2,), (1, 3), ()):
        with pytest.raises(ValueError, match=r"op: weight \(.*\) .* x \(2, 3\)"):
            check_row_parameter("op", "weight", torch.ones(shape), "x", x)
