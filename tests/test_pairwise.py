"""Tests of the function that parametrises other tests by pairs of values."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.pairwise import pairwise

OPTIONS = {"size": [1, 2, 3, 4], "kind": ["a", "b", "c"], "bias": [False, True], "seed": [0, 1]}


def rows(*rules, **options) -> list[tuple]:
    return [case.values for case in pairwise(*rules, **options).args[1]]


def pairs_of(cases: list[tuple]) -> set:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


def product_of(options: dict) -> list[tuple]:
    made: list[tuple] = [()]
    for values in options.values():
        made = [(*row, value) for row in made for value in values]
    return made


def test_every_pair_occurs_in_few_cases() -> None:
    cases = rows(**OPTIONS)
    assert pairs_of(cases) == pairs_of(product_of(OPTIONS))
    assert 12 <= len(cases) <= 15
    assert cases == rows(**OPTIONS)
    assert rows(one=[1, 2]) == [(1,), (2,)]


def test_rules_exclude_pairs() -> None:
    def rule(size, kind) -> bool:
        return size < 3 or kind == "a"

    kept = [row for row in product_of(OPTIONS) if rule(*row[:2])]
    assert pairs_of(rows(rule, **OPTIONS)) == pairs_of(kept)


def test_values_with_marks_have_a_cover_of_their_own() -> None:
    places = ["cpu", "cpu-low", pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")]
    cases = pairwise(place=places, kind=[1, 2], bias=[3, 4]).args[1]
    for on_gpu in (False, True):
        part = [case for case in cases if bool(case.marks) == on_gpu]
        assert all(case.id.startswith("gpu") == on_gpu for case in part)
        assert {case.values[1:] for case in part} == {(1, 3), (1, 4), (2, 3), (2, 4)}
