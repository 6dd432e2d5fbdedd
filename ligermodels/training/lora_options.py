"""The option `lora` of a run, read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from ligermodels.errors import ConfigError, short_repr

_EXAMPLE = "r=16,alpha=32,dropout=0.05"
_MAX_ALPHA = 1e30  # float32 holds it, and its products with numbers of usual size


@dataclass(frozen=True)
class LoraOptions:
    """The rank r of an adapter, its scale times r, and the rate at which its inputs are dropped."""

    r: int
    alpha: float
    dropout: float = 0.0


def parse_lora(text: str) -> LoraOptions:
    """Return the options in a text such as "r=16,alpha=32,dropout=0.05".

    Only r must be given. By default, alpha is twice r, and nothing is dropped.

    Raises:
        ConfigError: the text cannot be read, or a value is beyond its limits.
    """
    given: dict[str, float] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in ("r", "alpha", "dropout") or not equals or name in given:
            raise ConfigError(
                f"lora: {short_repr(item.strip())} cannot be read; expected r, alpha and dropout, "
                f"as in {_EXAMPLE}"
            )
        try:
            given[name] = int(value) if name == "r" else float(value)
        except ValueError:
            kind = "a whole number" if name == "r" else "a number"
            raise ConfigError(f"lora: {name} must be {kind}, not {short_repr(value)}") from None
    if not 1 <= given.get("r", 0) <= 2**16:
        raise ConfigError(f"lora: r, the rank, must be from 1 to {2**16}, as in {_EXAMPLE}")
    alpha, dropout = given.get("alpha", 2 * given["r"]), given.get("dropout", 0.0)
    if not 0 < alpha <= _MAX_ALPHA:
        raise ConfigError(
            f"lora: alpha must be more than 0 and at most {_MAX_ALPHA:g}, not {alpha:g}"
        )
    if not 0 <= dropout < 1:
        raise ConfigError(f"lora: dropout must be at least 0 and less than 1, not {dropout:g}")
    return LoraOptions(int(given["r"]), alpha, dropout)
