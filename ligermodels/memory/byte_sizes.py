"""Integers and numbers of bytes that a user gives. This module does not import torch."""

import re
from numbers import Integral
from typing import Any

from ligermodels.errors import ConfigError, short_repr

MIB, GIB = 2**20, 2**30
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": MIB, "gib": GIB, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_PATTERN = re.compile(r"\s*(\d{1,30}(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)


def integer(value: Any) -> int | None:
    """Return a Python or numpy integer as an int, or None for other values, bool among them."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def parse_bytes(value: Any, name: str) -> int:
    """Return a number of bytes from an integer or a text such as "40GiB" or "80 GB".

    Args: name: what the number is, for the message.
    Raises:
        ConfigError: the value is not a number of bytes.
    """
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match and match[2].lower() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].lower()])
    elif (size := integer(value)) is not None and size >= 0:
        return size
    raise ConfigError(
        f"{name}={short_repr(value)}: expected a number of bytes, such as 42949672960, "
        '"40GiB" or "80GB"'
    )
