"""Numbers of bytes as text."""

from __future__ import annotations

import numpy as np
import pytest

from ligermodels.errors import ConfigError
from ligermodels.memory.byte_sizes import parse_bytes


def test_bytes_as_text() -> None:
    given = {"40GiB": 40 * 2**30, "1.5 gb": 15 * 10**8, "7": 7, 7: 7, "1e3": 1000, "2e1kB": 20000}
    for value, size in (*given.items(), (np.int64(7), 7)):
        found = parse_bytes(value, "budget")
        assert found == size and type(found) is int
    for wrong in ("", "GB", "40 apples", "-1", -1, True, np.True_, 1.5, None, "1e999", "nan"):
        with pytest.raises(ConfigError, match=r"budget=.*expected a number of bytes"):
            parse_bytes(wrong, "budget")
