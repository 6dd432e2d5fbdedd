"""Every block of the README runs as it is pasted, and its table has the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import markdown

README = markdown.ROOT / "README.md"
RESULTS = markdown.ROOT / "benchmarks" / "results"
TEXT = README.read_text(encoding="utf-8")
# The tests run the blocks with these replacements; the small sizes make them quick.
SMALLER = {
    "--max-steps 20": "--max-steps 1",
    "--seq-len 256": "--seq-len 32",
    "--max-eval-rows 8": "--max-eval-rows 1",
    "--max-new-tokens 40": "--max-new-tokens 4",
}


@pytest.fixture(scope="module")
def small_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markdown.small_checkpoint(smollm2, tmp_path_factory.mktemp("readme") / "smollm2")


def test_it_is_one_page() -> None:
    lines = TEXT.splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]


def test_every_shell_block_can_be_pasted_in_turn_and_again(
    small_smollm2: Path, tmp_path: Path
) -> None:
    """Run each block twice, from the clone to the export; the reader's shell stays in a folder."""
    elsewhere, clone = tmp_path / "elsewhere", tmp_path / "ligermodels"
    elsewhere.mkdir()
    blocks = markdown.runnable(README, markdown.SHELL)
    for shown in SMALLER:
        assert sum(shown in block.text for block in blocks) == 1
    for number, block in enumerate(blocks):
        text = block.text.replace(markdown.CHECKPOINT, str(small_smollm2))
        for shown, smaller in SMALLER.items():
            text = text.replace(shown, smaller)
        if number == 0:  # the reader's shell moves, and the next blocks start where it ends
            text += "pwd\n"
        for folder in (elsewhere, clone) if number == 0 else (clone, clone):
            printed = markdown.run_shell(text, folder, tmp_path)
            if number == 0:
                assert printed.split() == [str(clone)]
    assert (clone / ".venv" / "bin" / "activate").is_file()
    for folder in ("novel/model", "novel-bf16"):
        assert (clone / "runs" / folder / "model.safetensors").is_file()
    for file in ("metrics.jsonl", "loss.png"):
        assert (clone / "runs" / "novel" / file).is_file()


# The small one has the same steps.
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_first_python_block_trains_and_exports(
    real: bool,
    smollm2: Path,
    small_smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = markdown.runnable(README, markdown.PYTHON)[0].text
    folder, width = (smollm2, 576) if real else (small_smollm2, 32)
    names = markdown.paste_python(text.replace(markdown.CHECKPOINT, str(folder)))
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[:5]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < (0.5 if real else 1.0) * losses[0]
    assert names["hidden"].shape == (*names["ids"].shape, width)
    assert (tmp_path / "runs" / "first" / "model.safetensors").is_file()


def test_the_second_python_block_composes() -> None:
    first, second = markdown.runnable(README, markdown.PYTHON)
    assert markdown.CHECKPOINT in first.text
    names = markdown.paste_python(second.text)
    assert names["attention"].qkv_proj.weight.grad.count_nonzero() > 0


def test_every_page_is_linked() -> None:
    missing = [
        page.name
        for page in sorted((markdown.ROOT / "docs").glob("*.md"))
        if f"(docs/{page.name})" not in TEXT and page.name != "index.md"  # the site's own start
    ]
    assert not missing


def steps() -> dict[str, list[dict[str, Any]]]:
    """Return the committed rows of each workload: transformers, with Liger, ours."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "step.json").read_text())["rows"]:
        found.setdefault(f"Llama-3-8B, {row['batch x seq']}", {})[row["implementation"]] = row
    for row in json.loads((RESULTS / "families.json").read_text())["rows"]:
        workload = f"{row['preset']}, 1 x {row['seq']}"
        found.setdefault(workload, {})[row["implementation"]] = row
    names = ("transformers", "transformers + liger", "ligermodels")
    return {workload: [rows[name] for name in names] for workload, rows in found.items()}


def step_line(workload: str, rows: list[dict[str, Any]]) -> str:
    """Return a table line with milliseconds, of which the least is bold, and GiB."""
    cells = [workload]
    for row in rows:
        ms = f"{row['ms']:.{0 if 'batch x seq' in row else 1}f}"
        least = row["ms"] == min(each["ms"] for each in rows)
        cells.append(f"{f'**{ms}**' if least else ms} / {row['peak GiB']:.1f}")
    return f"| {' | '.join(cells)} |"


def test_the_table_is_that_of_the_committed_runs() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert rows[2:] == [step_line(*each) for each in steps().items()]
    assert len(rows) == 11


def test_what_it_says_of_memory_is_in_the_table() -> None:
    shares = [ours["peak GiB"] / theirs["peak GiB"] for theirs, _, ours in steps().values()]
    assert f"at between {min(shares):.0%} and {max(shares):.0%} of the memory" in TEXT
    for theirs, liger, ours in steps().values():
        assert ours["ms"] < min(theirs["ms"], liger["ms"])
