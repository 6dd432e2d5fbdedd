"""Run the rows of matrix_cells and matrix_refusals for each family, and write a page of them.

    python -m tests.integrations.matrix        writes docs/trainers_matrix.md

Nothing is written unless all errors are within their bounds and all refusals have their words.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from tests import markdown
from tests.examples import ray_cases, trainer_cases
from tests.examples.trainer_cases import FAMILIES
from tests.integrations.matrix_cells import CELLS, EXPERT_CELLS, Cell
from tests.integrations.matrix_refusals import REFUSALS, Refusal
from tests.integrations.tiny import checkpoint
from tests.parallel.ranks import run_ranks

PAGE = markdown.ROOT / "docs" / "trainers_matrix.md"
# The modules of the tools, and the names of their packages.
TOOLS = {
    name: name
    for name in ("transformers", "trl", "peft", "accelerate", "lightning", "deepspeed", "ray")
} | {"lm_eval": "lm-eval", "bitsandbytes": "bitsandbytes", "torchao": "torchao", "torch": "torch"}
# The cases of trainer_cases with two processes are rows, too: their names, and the bound.
RANKED = ("accelerate, FSDP2", "Lightning, FSDP2", "DeepSpeed, ZeRO-3")
RANKED_BOUND = 1e-5
HEADINGS = ["tool", "feature", "compared", "bound", *FAMILIES]
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
EXPERT_HEADINGS = ["tool", "with experts", "compared", "bound", *EXPERTS]
REFUSED_HEADINGS = ["tool", "refused", "words of the error", *FAMILIES]

INTRODUCTION = """\
# Tools and families

`python -m tests.integrations.matrix` writes this page; do not edit it. Each cell of the first table
is the largest error of a native model relative to transformers' model in the same tool, with the
same weights, data and arguments in float32, on a random model of the family. Losses are those of
some steps. The rows of the native model do without `LigerForCausalLM`. The rows with FSDP2, ZeRO-3
and Ray Train have two processes, and are also compared with one process, losses and weights.

Checkpoints of Gemma 3 with images are refused by `LigerForCausalLM.from_pretrained` ("and other
towers"). Their text model is one of the family gemma3_text, and
`LigerForCausalLM.from_native(AutoLiger.from_hf(path))` takes it.

The page was written with {versions}.

"""
EXPERT_INTRODUCTION = """
The same for families with experts. In TRL, their balance is part of the loss.

"""
REFUSED_INTRODUCTION = """
What is refused, with words of the error. Each cell was tried;
[trainers.md](trainers.md#what-is-refused) has the reasons.

"""


def shown(error: float) -> str:
    return "exact" if error == 0 else f"{error:.0e}"


def head_of(cell: Cell) -> list[str]:
    return [cell.tool, cell.feature, cell.compared, shown(cell.bound)]


def headed() -> list[list[str]]:
    """Return the first cells of each row of the first table."""
    first = [head_of(cell) for cell in CELLS]
    for name in (*RANKED, "Ray Train, DDP"):
        tool, feature = name.split(", ")
        first.append([tool, f"native model, {feature}", "losses, weights", shown(RANKED_BOUND)])
    return first


def headed_refusals() -> list[list[str]]:
    """Return the first cells of each row of the second table."""
    return [[each.tool, each.what, each.words] for each in REFUSALS]


def words_of(refusal: Refusal, folder: Path, place: Path) -> str:
    """Return what the error of a refusal says, or an empty text if nothing is refused."""
    try:
        refusal.attempt(folder, place)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def errors_of(cells: list[Cell], folders: dict[str, Path], made: Path) -> list[list[float]]:
    """Run cells, and return the errors of each row."""
    found = []
    for number, cell in enumerate(cells):
        errors = []
        for family, folder in folders.items():
            place = made / f"{number}-{family}"
            place.mkdir()
            errors.append(cell.error(folder, place))
            assert errors[-1] <= cell.bound, (cell, family, errors[-1])
        found.append(errors)
    return found


def measure(folders: dict[str, Path], made: Path) -> list[list[float]]:
    """Run all cells and the cases with two processes, and return the errors of each row."""
    found = errors_of(CELLS, folders, made)
    (made / "ranks").mkdir()
    report = run_ranks("tests.examples.trainer_cases", trainer_cases.RANKS, made / "ranks")
    for name in RANKED:
        errors = []
        for family in FAMILIES:
            outcomes = [o for n, o in report.items() if n.startswith(f"{name}, {family},")]
            assert outcomes and all(isinstance(o, dict) for o in outcomes), outcomes
            errors.append(largest([e for o in outcomes if isinstance(o, dict) for e in o.values()]))
        found.append(errors)
    (made / "ray").mkdir()
    in_ray = ray_cases.errors(FAMILIES, made / "ray")
    found.append([largest([*in_ray[family].values()]) for family in FAMILIES])
    return found


def measure_experts(made: Path) -> list[list[float]]:
    """Run the cells of families with experts, and return the errors of each row."""
    return errors_of(EXPERT_CELLS, {name: checkpoint(name, made / name) for name in EXPERTS}, made)


def largest(errors: list[float]) -> float:
    """Return the largest error in several processes; each, and so no NaN, is within the bound."""
    assert all(error <= RANKED_BOUND for error in errors), errors
    return max(errors)


def refuse(folders: dict[str, Path], made: Path) -> None:
    """Try everything that is refused."""
    for number, refusal in enumerate(REFUSALS):
        for family, folder in folders.items():
            place = made / f"refused-{number}-{family}"
            place.mkdir()
            said = words_of(refusal, folder, place)
            assert refusal.words in said, (refusal, family, said)


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    if missing := [TOOLS[name] for name in TOOLS if find_spec(name) is None]:
        sys.exit(f"{', '.join(missing)}: {trainer_cases.INSTALL}")
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        folders = {family: checkpoint(family, made / family) for family in FAMILIES}
        refuse(folders, made)
        measured = measure(folders, made)
        with_experts = measure_experts(made)
    versions = ", ".join(f"{name} {version(name)}" for name in TOOLS.values())
    works = [first + [*map(shown, errors)] for first, errors in zip(headed(), measured)]
    routed = [
        head_of(cell) + [*map(shown, errors)] for cell, errors in zip(EXPERT_CELLS, with_experts)
    ]
    refused = [first + ["refused"] * len(FAMILIES) for first in headed_refusals()]
    PAGE.write_text(
        INTRODUCTION.format(versions=versions)
        + table(HEADINGS, works)
        + EXPERT_INTRODUCTION
        + table(EXPERT_HEADINGS, routed)
        + REFUSED_INTRODUCTION
        + table(REFUSED_HEADINGS, refused)
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
