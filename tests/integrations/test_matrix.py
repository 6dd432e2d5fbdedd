"""Each tool gives the numbers of transformers' model in every family, and the page says so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.trainer_cases import FAMILIES, INSTALL
from tests.integrations import matrix

PAIRS = [(cell, family) for cell in matrix.CELLS for family in FAMILIES]
# Each row once, and each family; the rows of a tool have tests of their own with more options.
SAMPLE = [number * len(FAMILIES) + number % len(FAMILIES) for number in range(len(matrix.CELLS))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: matrix.checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES
    }


@pytest.mark.parametrize(
    ("cell", "family"),
    [
        pytest.param(
            *pair,
            marks=[] if number in SAMPLE[::2] else pytest.mark.long,
            id=f"{pair[0].tool}, {pair[0].feature}, {pair[1]}",
        )
        for number, pair in enumerate(PAIRS)
    ],
)
def test_cell(cell: matrix.Cell, family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    if find_spec(cell.needs) is None:
        pytest.skip(INSTALL)
    assert cell.error(folders[family], tmp_path) <= cell.bound


def test_the_page_has_these_rows() -> None:
    lines = [line for line in matrix.PAGE.read_text().splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert table[0] == matrix.HEADINGS
    assert [row[:4] for row in table[2:]] == matrix.headed()
    for row in table[2:]:
        bound = 0.0 if row[3] == "exact" else float(row[3])
        errors = [0.0 if cell == "exact" else float(cell) for cell in row[4:]]
        assert len(errors) == len(FAMILIES) and max(errors) <= bound, row
