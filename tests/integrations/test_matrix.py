"""Each tool gives the numbers of transformers' model in every family, and the page says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.trainer_cases import FAMILIES
from tests.integrations import matrix, outside_tools
from tests.integrations.matrix_cells import CELLS, EXPERT_CELLS, Cell
from tests.integrations.matrix_refusals import REFUSALS, Refusal
from tests.integrations.tiny import checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (*FAMILIES, *matrix.EXPERTS)
    return {family: checkpoint(family, tmp_path_factory.mktemp(family)) for family in names}


def pairs(rows: list[Any], names: list[str]) -> list[Any]:
    """Return each row with each family; all but one family of each row, in turn, are long."""
    count = len(FAMILIES)
    return [
        pytest.param(
            row,
            family,
            marks=[] if number % count == place else pytest.mark.long,
            id=f"{row.tool}, {name}, {family}",
        )
        for number, (row, name) in enumerate(zip(rows, names, strict=True))
        for place, family in enumerate(FAMILIES)
    ]


# The rows with two processes are in tests/examples/test_trainers.py.
@pytest.mark.parametrize(("cell", "family"), pairs(CELLS, [cell.feature for cell in CELLS]))
def test_cell(cell: Cell, family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    assert cell.error(folders[family], tmp_path) <= cell.bound


SAMPLED = {("save_pretrained", "mixtral"), ("SFT", "qwen3_moe"), ("steps", "qwen3_moe")}
# By default, a few of the tools that add the balance of experts to the loss, or save the weights.
EXPERT_CASES = [
    pytest.param(
        cell,
        family,
        marks=[] if (cell.feature, family) in SAMPLED else pytest.mark.long,
        id=f"{cell.tool}, {cell.feature}, {family}",
    )
    for cell in EXPERT_CELLS
    for family in matrix.EXPERTS
]


@pytest.mark.parametrize(("cell", "family"), EXPERT_CASES)
def test_cell_with_experts(
    cell: Cell, family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert cell.error(folders[family], tmp_path) <= cell.bound


@pytest.mark.parametrize(("refusal", "family"), pairs(REFUSALS, [row.what for row in REFUSALS]))
def test_refusal(refusal: Refusal, family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    assert refusal.words in matrix.words_of(refusal, folders[family], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("tool", outside_tools.TOOLS)
def test_a_tool_with_its_own_environment(tool: str, tmp_path: Path) -> None:
    made = outside_tools.ROOT / "build" / tool / ".made"
    if not made.exists():
        pytest.skip(f"{made} does not exist; run make outside-tools")
    errors = outside_tools.measure(tool, tmp_path, ["llama", "gemma2"])
    assert len(errors) == 4 and not outside_tools.beyond(errors)
