"""Parametrise a test by pairs: each pair of two options' values occurs in some case.

A full product of options multiplies cases that differ in options that do not interact. Most faults
need one option or two to show, and a cover of all pairs finds those with far fewer cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, int]  # for each option that has a value: the position of the value in its list


def pairwise(
    *rules: Callable[..., bool], indirect: Sequence[str] = (), **options: Iterable[Any]
) -> pytest.MarkDecorator:
    """Return a pytest.mark.parametrize whose cases hold each pair of two options' values.

    `@pairwise(reduction=["mean", "none"], bias=[False, True], place=PLACES)` replaces three
    parametrize marks. The cases depend on the arguments only, so they are the same in every run.

    Args:
        rules: functions whose parameters are names of options, and which return whether these
            values may occur together. Pairs that the rules exclude occur in no case.
        indirect: the options that are fixtures, as in pytest.mark.parametrize.
        options: the values of each option. A pytest.param has the id and the marks of its value.
            Values with different marks get separate covers: a machine that skips the cases of
            a GPU still runs all pairs of the other options.
    """
    values = {
        name: [x if hasattr(x, "marks") else pytest.param(x) for x in given]
        for name, given in options.items()
    }
    ids = {name: [_id(name, i, x) for i, x in enumerate(given)] for name, given in values.items()}
    groups = {name: _groups_by_marks(given) for name, given in values.items()}
    cases = []
    for group in product(*groups.values()):
        for row in cover(dict(zip(values, group)), rules, {k: _bare(v) for k, v in values.items()}):
            chosen = [values[name][i] for name, i in row.items()]
            cases.append(
                pytest.param(
                    *(x.values[0] for x in chosen),
                    marks=[mark for x in chosen for mark in x.marks],
                    id="-".join(ids[name][i] for name, i in row.items()),
                )
            )
    return pytest.mark.parametrize(",".join(options), cases, indirect=list(indirect))


def cover(
    positions: dict[str, list[int]],
    rules: Sequence[Callable[..., bool]],
    values: dict[str, list[Any]],
) -> list[Row]:
    """Return rows that hold each allowed pair of positions: a greedy choice, pair by pair.

    Each row starts from the first pair that no row holds yet. Each further option then takes the
    value that adds the most new pairs; among equals, the value that occurs least so far.
    """
    names = list(positions)
    known = [(list(inspect.signature(rule).parameters), rule) for rule in rules]
    if len(names) == 1:
        return [{names[0]: i} for i in positions[names[0]]]
    missing = {
        ((a, i), (b, j)): None
        for a, b in combinations(names, 2)
        for i in positions[a]
        for j in positions[b]
    }
    used = {(name, i): 0 for name in names for i in positions[name]}
    by_length = sorted(names, key=lambda name: -len(positions[name]))

    def allowed(row: Row, added: str) -> bool:
        return all(
            rule(**{name: values[name][row[name]] for name in parameters})
            for parameters, rule in known
            if added in parameters and row.keys() >= set(parameters)
        )

    def new_pairs(row: Row, name: str, i: int) -> int:
        order = names.index
        return sum(
            (((other, j), (name, i)) if order(other) < order(name) else ((name, i), (other, j)))
            in missing
            for other, j in row.items()
        )

    def filled(row: Row) -> Row | None:
        """Return the row with a value for every option, or None if the rules allow none."""
        name = next((name for name in by_length if name not in row), None)
        if name is None:
            return row
        best_first = sorted(
            positions[name], key=lambda i: (-new_pairs(row, name, i), used[name, i], i)
        )
        for i in best_first:
            longer = {**row, name: i}
            if allowed(longer, name) and (whole := filled(longer)):
                return whole
        return None

    rows = []
    while missing:
        (a, i), (b, j) = pair = next(iter(missing))
        row = {a: i, b: j}
        whole = filled(row) if allowed(row, a) and allowed(row, b) else None
        if whole is None:
            del missing[pair]
            continue
        rows.append({name: whole[name] for name in names})
        for one, other in combinations(rows[-1].items(), 2):
            missing.pop((one, other), None)
        for item in rows[-1].items():
            used[item] += 1
    return rows


def _bare(given: Sequence[Any]) -> list[Any]:
    return [x.values[0] for x in given]


def _groups_by_marks(given: Sequence[Any]) -> list[list[int]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(given):
        groups.setdefault(tuple(mark.name for mark in x.marks), []).append(i)
    return list(groups.values())


def _id(name: str, i: int, x: Any) -> str:
    if x.id is not None:
        return str(x.id)
    (value,) = x.values
    text = getattr(value, "__name__", str(value))
    return text if len(text) <= 40 else f"{name}{i}"
