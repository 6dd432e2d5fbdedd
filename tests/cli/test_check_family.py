"""`ligermodels check-family` prints the report of `check_family`, and fails if it does."""

from __future__ import annotations

import json

import pytest

from ligermodels.checks import check_family as module
from ligermodels.checks.check_family import Cell, FamilyReport
from ligermodels.models.llama import LigerLlama, LlamaConfig


@pytest.fixture
def asked(monkeypatch):
    """What the command asks for; the report has one row."""
    found = {}

    def check_family(family, config, **options):
        found.update(family=family, config=config, **options)
        row = {"logits": found.get("cell", Cell(1e-7, "", True))}
        return FamilyReport("llama", {"small config": row})

    monkeypatch.setattr(module, "check_family", check_family)
    return found


def test_a_family_by_its_name(call, asked):
    code, out, err = call("check-family", "llama", "--no-compile")
    assert (code, err) == (0, "") and asked["family"] is LigerLlama
    assert asked["compile"] is False
    assert asked["config"] is None and asked["device"].type == "cpu"
    assert (
        "1e-07  1e-05  small config" in out
        and out.splitlines()[-1].endswith("within each bound (logits 1e-07 of 1e-05)")
        and "beside those of transformers" in out
    )
    assert max(map(len, out.splitlines())) <= 80


def test_the_config_of_a_checkpoint(call, asked, tmp_path):
    """Weights are not needed."""
    raw = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert call("check-family", tmp_path)[0] == 0
    assert isinstance(asked["config"], LlamaConfig) and asked["config"].hidden_size == 96


def test_a_failed_check(call, asked):
    asked["cell"] = Cell(0.1, "", False)
    code, out, _ = call("check-family", "llama")
    assert code == 1 and "FAILED: 1 of 1 checks" in out
