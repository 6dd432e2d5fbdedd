"""Kinds of values on the command line."""

from __future__ import annotations

import argparse

import pytest

from ligermodels.cli.options import byte_size, real_number, whole_number


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 gb", 1_500_000_000), ("2KiB", 2048), ("77", 77), ("1e3", 1000)],
)
def test_sizes(text, size):
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "GB", "-1GB", "0", "0.1", "nan", "inf", "1e999GB"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        byte_size(text)


def test_limits_of_numbers():
    assert whole_number(1)("1") == 1
    assert real_number(0, 1)("1") == 1.0
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        whole_number(1)("0")
    for text in ("0", "1.1", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="at most 1"):
            real_number(0, 1)(text)
    with pytest.raises(argparse.ArgumentTypeError, match="more than 0"):
        real_number(0)("inf")
