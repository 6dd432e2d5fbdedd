"""Every family in examples/families is exact beside transformers, and short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ligermodels import AutoLiger, cli
from ligermodels.checks import check_family as checks
from ligermodels.checks.check_family import check_family
from tests import outside
from tests.cli.helpers import SMALL
from tests.examples import family_table
from tests.training.tiny_run import make_text, make_tokenizer

pytestmark = pytest.mark.usefixtures("registry")


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", outside.NAMES)
def test_it_is_exact(name: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default without the variants of its config, and not compiled."""
    if not whole:
        monkeypatch.setattr(checks, "small_variants", lambda config: {"small config": config})
    report = check_family(outside.family(name), compile=whole)
    assert report.ok, str(report)
    assert all(cell.error is not None for row in report.rows.values() for cell in row.values())


def test_the_correction_of_choices_has_an_effect_and_stays_float32(tmp_path: Path) -> None:
    cls = outside.family("glm4_moe")
    torch.manual_seed(0)
    ours = cls(cls.config_class.small()).bfloat16()
    bias = ours.layers[1].mlp.routed.router.correction_bias
    bias.data = torch.randn_like(bias, dtype=torch.float32)
    ours.save_hf(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours, ids = cls.from_hf(tmp_path, dtype=torch.float32), torch.randint(3, 131, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(ours.head.logits(ours(ids)), theirs(ids).logits)
        ours.layers[1].mlp.routed.router.correction_bias.zero_()
        assert not ours.head.logits(ours(ids)).allclose(theirs(ids).logits, rtol=1e-2)
    for dtype in (None, torch.bfloat16):
        again = cls.from_hf(tmp_path, dtype=dtype).layers[1].mlp.routed.router
        assert torch.equal(again.correction_bias, bias) and again.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["glm4", pytest.param("glm4_moe", marks=pytest.mark.long)])
def test_every_command_takes_a_family_from_outside(name: str, tmp_path: Any, capfd: Any) -> None:
    cls = outside.family(name)
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    source, out = str(tmp_path / "source"), str(tmp_path / "run")
    cls(cls.config_class.small(**sizes, max_position_embeddings=256)).save_hf(source)
    make_tokenizer(tmp_path / "source")
    text = str(make_text(tmp_path / "words.txt"))
    for command in (
        ["inspect", source],
        ["convert", source, "--verify"],
        ["convert", source, str(tmp_path / "low"), "--dtype", "bfloat16", "--verify"],
        ["finetune", source, "--train-files", text, "--output-dir", out, *SMALL],
        ["generate", f"{out}/model", "the cat", "--max-new-tokens", "4", "--device", "cpu"],
    ):
        assert cli.main(command) == 0, capfd.readouterr()
    assert type(AutoLiger.from_hf(f"{out}/model")) is cls
    assert name in capfd.readouterr().out


def test_the_files_are_short_and_use_no_private_name() -> None:
    """`python -m tests.examples.family_table` writes the page that gives their lines."""
    own = (f"{name}.py" for name in ("encoder", "shared_keys", "look_and_tell"))
    for path in (*outside.FOLDER.glob("*.py"), *(outside.FOLDER.parent / name for name in own)):
        text = path.read_text()
        assert len(text.splitlines()) < 100, path
        assert not re.findall(r"\b(?:ligermodels|lm)(?:\.\w+)*\._\w+|import _\w+", text), path
        rooms = set(re.findall(r"from (ligermodels[\w.]*) import", text))
        assert rooms <= {"ligermodels", "ligermodels.layers"}, path
    lines = re.findall(r"^\| `(\w+)\.py` \| (\d+)", family_table.PAGE.read_text(), re.M)
    assert lines == [(name, str(family_table.lines_of(name))) for name in outside.NAMES]
