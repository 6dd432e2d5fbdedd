"""Options as fields: their types, choices and limits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ligermodels.errors import ConfigError
from ligermodels.training.options import check_options, limit_complaint, option, types_of


@dataclass(kw_only=True)
class Options:
    names: list[str] | None = option(None, "names", choices=("a", "b"))  # noqa: RUF009
    shares: list[float] | None = option(None, "shares", more_than=0)  # noqa: RUF009
    count: int = option(1, "a count", at_least=1)


def test_the_types_of_options_leave_none_out():
    assert types_of(Options) == {"names": list[str], "shares": list[float], "count": int}


def test_each_item_of_a_list_is_checked(subtests):
    check_options(Options(names=["b", "a"], shares=[1, 0.5]))
    for given, message in (
        ({"names": "a"}, "names: must be a list of texts, not 'a'"),
        ({"names": ["a", "c"]}, "names: must be one of a, b, not 'c'"),
        ({"shares": ["a"]}, r"shares: must be a list of numbers"),
        ({"shares": [0.5, 0]}, "shares: must be more than 0, not 0"),
        ({"count": None}, "count: must be a whole number, not None"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            check_options(Options(**given))


def test_a_number_breaks_a_limit_or_none():
    assert limit_complaint(1, at_least=1, at_most=1) is None
    assert limit_complaint(0, at_least=1) == "must be at least 1, not 0"
    assert limit_complaint(1.0, less_than=1) == "must be less than 1, not 1.0"
    assert limit_complaint(float("inf"), more_than=0) == "must be more than 0, not inf"
    assert limit_complaint(float("inf")) is None
