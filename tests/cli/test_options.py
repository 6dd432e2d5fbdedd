"""Tests of the types of command line values."""

from __future__ import annotations

import argparse

import pytest

from ligermodels.cli.options import byte_size, number


def test_sizes(subtests):
    for text, size in (
        ("5GB", 5 * 10**9),
        ("1.5 gb", 1_500_000_000),
        ("2KiB", 2048),
        ("77", 77),
        ("1e3", 1000),
    ):
        with subtests.test(text):
            assert byte_size(text) == size


def test_bad_sizes_are_refused(subtests):
    for text in ("", "big", "GB", "-1GB", "0", "0.1", "nan", "inf", "1e999GB"):
        with subtests.test(repr(text)):
            with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
                byte_size(text)


def test_limits_of_numbers():
    assert number(int, at_least=1)("1") == 1
    assert number(float, more_than=0, at_most=1)("1") == 1.0
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        number(int, at_least=1)("0")
    for text, words in (("0", "more than 0"), ("1.1", "at most 1"), ("nan", "more than 0")):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            number(float, more_than=0, at_most=1)(text)
    with pytest.raises(argparse.ArgumentTypeError, match="more than 0"):
        number(float, more_than=0)("inf")
