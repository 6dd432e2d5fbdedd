"""Numbers of bytes as text."""

from __future__ import annotations

from typing import Any

import pytest

from ligermodels.errors import ConfigError
from ligermodels.memory.byte_sizes import parse_bytes


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("40GiB", 40 * 2**30),
        ("1.5 gb", 15 * 10**8),
        ("7", 7),
        (7, 7),
        ("1e3", 1000),
        ("2e1kB", 20000),
    ],
)
def test_bytes_as_text(given: int | str, size: int) -> None:
    assert parse_bytes(given, "budget") == size


@pytest.mark.parametrize(
    "value", ["", "GB", "40 apples", "-1", -1, True, 1.5, None, "1e999", "auto", "nan"]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget=.*expected a number of bytes"):
        parse_bytes(value, "budget")
