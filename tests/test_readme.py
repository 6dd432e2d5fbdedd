"""The README's Python runs as it stands, on the small checkpoint where it names a big one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
RESULTS = README.parent / "benchmarks" / "results"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_all_blocks_are_known() -> None:
    assert len(BLOCKS) == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4), ids=["main job", "head", "block", "from a checkpoint"])
def test_block(number: int, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = BLOCKS[number]
    for theirs, ours in (
        ('"build/smollm2"', repr(str(smollm2))),
        ('"meta-llama/Llama-3.2-1B"', repr(str(smollm2))),
        ('"cuda"', '"cpu"'),
    ):
        code = code.replace(theirs, ours)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(code, f"README, block {number}", "exec"), names)
    if number == 0:
        assert (tmp_path / "out" / "model.safetensors").is_file()
        assert names["hidden"].shape == (*names["ids"].shape, 576)
    elif number == 1:
        assert names["model"].embed_tokens.weight.grad.count_nonzero() > 0
        valid = names["labels"] != -100
        assert names["out"].token_log_probs[:, :-1][valid[:, 1:]].isfinite().all()
    else:
        assert names["loss" if number == 2 else "model"] is not None


def test_tables_of_the_ops_are_those_of_the_committed_run() -> None:
    """Row for row, but for a peer that is absent everywhere."""
    text = README.read_text(encoding="utf-8")
    shown = text[text.index("**Ops**") : text.index("**Training in bf16**")].splitlines()
    rows = [line for line in shown if line.startswith("|")]
    measured = (RESULTS / "ops.md").read_text(encoding="utf-8")
    measured = measured.replace("absent (torch linear_cross_entropy), ", "")
    assert len(rows) > 20
    assert not set(rows) - set(measured.splitlines())


def test_tables_of_the_steps_are_those_of_the_committed_runs() -> None:
    lines = README.read_text(encoding="utf-8").replace("**", "").splitlines()
    for row in json.loads((RESULTS / "step.json").read_text())["rows"]:
        shape, name = row["batch x seq"], row["implementation"]
        assert f"| {shape} | {name} | {row['ms']:.0f} | {row['peak GiB']:.1f} |" in lines
    families: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "families.json").read_text())["rows"]:
        families.setdefault((row["preset"], row["seq"]), {})[row["implementation"]] = row
    assert len(families) == 7
    for (preset, tokens), rows in families.items():
        shown = [rows[n] for n in ("transformers", "transformers + liger", "ligermodels")]
        cells = " | ".join(f"{row['ms']:.1f} / {row['peak GiB']:.1f}" for row in shown)
        errors = ", ".join(f"{row['gradient error']:.4f}" for row in shown)
        workload = f"{preset.removesuffix(' layers')} x {tokens}"
        assert f"| {workload} | {cells} | {errors} |" in lines
