"""Numbers of bytes as text."""

from __future__ import annotations

from typing import Any

import numpy as np
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
        (np.int64(7), 7),
        ("1e3", 1000),
        ("2e1kB", 20000),
    ],
)
def test_bytes_as_text(given: int | str, size: int) -> None:
    found = parse_bytes(given, "budget")
    assert found == size and type(found) is int


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GB",
        "40 apples",
        "-1",
        -1,
        True,
        np.True_,
        1.5,
        np.float64(2),
        None,
        "1e999",
        "auto",
        "nan",
    ],
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget=.*expected a number of bytes"):
        parse_bytes(value, "budget")
