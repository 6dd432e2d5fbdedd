"""Runs whose linears compute in float8: they say so, resume exactly and refuse what cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ligermodels import AutoLiger, ConfigError, float8
from ligermodels.float8 import Float8Linear
from ligermodels.kernels.float8_linear import RECIPES
from ligermodels.training.config import FLOAT8_RECIPES
from ligermodels.training.model import load_checkpoint
from tests.training.tiny_run import forget, run, same, tensors, timeless

MODULE = sys.modules[float8.convert.__module__]


@pytest.fixture(autouse=True)
def narrow_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "SMALL", 16)


def test_the_option_has_the_recipes() -> None:
    assert FLOAT8_RECIPES == tuple(RECIPES)


def test_from_hf(checkpoint: Path) -> None:
    model = AutoLiger.from_hf(checkpoint, float8="rowwise")
    linear = model.layers[0].mlp.down_proj
    assert isinstance(linear, Float8Linear) and linear.recipe == RECIPES["rowwise"]


@pytest.mark.parametrize(
    "changes",
    [
        {"float8": "delayed", "gradient_accumulation_steps": 2},
        {"float8": "delayed", "lora_r": 4, "memory": "1GiB"},
        pytest.param(
            {"float8": "tensorwise", "gradient_accumulation_steps": 2}, marks=pytest.mark.long
        ),
        pytest.param({"load_in": "float8", "lora_r": 4}, marks=pytest.mark.long),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
@pytest.mark.usefixtures("rows_at_once")
def test_a_killed_run_resumes_bitwise(checkpoint, text, tmp_path, changes) -> None:
    changes = {**changes, "save_steps": 3, "max_steps": 6}
    whole = run(checkpoint, text, tmp_path / "whole", **changes)
    assert any(note.startswith("linears: float8 (down_proj, gate_up_proj") for note in whole.notes)
    assert whole.eval_after["eval_perplexity"] < 0.95 * whole.eval_before["eval_perplexity"]
    killed = tmp_path / "killed"
    run(checkpoint, text, killed, **changes)
    forget(killed, 6)
    again = run(checkpoint, text, killed, **changes, resume=True)
    assert timeless(killed) == timeless(tmp_path / "whole")
    assert same(tensors(whole.model_dir), tensors(again.model_dir))
    if changes.get("float8") == "delayed":  # with the scales of its last step
        model = load_checkpoint(killed, 3)
        if "lora_r" not in changes:
            assert all(rows[:, :2].all() for rows in float8.scales(model).values())


@pytest.mark.usefixtures("rows_at_once")
def test_weights_are_cast_once_for_a_step(checkpoint, text, tmp_path, monkeypatch) -> None:
    """Unless the budget has no space for the casts."""
    asked = []
    once = float8.weights_cast_once
    monkeypatch.setattr(float8, "weights_cast_once", lambda model: asked.append(1) or once(model))
    changes = {"float8": "tensorwise", "max_steps": 2, "memory": "1GiB"}
    plain = run(checkpoint, text, tmp_path / "plain", **changes)
    assert not asked and plain.model.memory_plan is not None
    changes["gradient_accumulation_steps"] = 2
    run(checkpoint, text, tmp_path / "once", **changes)
    assert len(asked) == 2
    frozen = {**changes, "gradient_accumulation_steps": 1, "lora_r": 4}
    run(checkpoint, text, tmp_path / "frozen", **frozen)
    assert len(asked) == 4
    frozen |= {"memory": "off", "activation_checkpointing": True}
    run(checkpoint, text, tmp_path / "recomputed", **frozen)
    assert len(asked) == 4
    # The model, its states and gradients take 1.3 MB, and casts would take 0.2 more.
    monkeypatch.setattr(float8, "casts_bytes", lambda model: 2**30)
    run(checkpoint, text, tmp_path / "each", **changes)
    assert len(asked) == 4


def test_what_is_refused(checkpoint, text, tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"float8 and load_in: .* leave one"):
        run(checkpoint, text, tmp_path / "run", float8="tensorwise", lora_r=4, load_in="4bit")
    with pytest.raises(ConfigError, match=r"float8: must be .*tensorwise"):
        run(checkpoint, text, tmp_path / "run", float8="mx")
    monkeypatch.setattr(MODULE, "SMALL", 1024)
    with pytest.raises(ConfigError, match="fewer than 1024 features"):
        run(checkpoint, text, tmp_path / "run", float8="tensorwise")
    assert not (tmp_path / "run" / "run.json").exists()
