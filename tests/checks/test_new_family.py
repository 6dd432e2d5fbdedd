"""A new family's file computes what transformers does, or says what it cannot begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ligermodels import AutoLiger, cli

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def checkpoint(folder: Path, kind: str, **more: Any) -> Any:
    """Save a tiny model of transformers as one of a family that nobody knows; return the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "nobodys"}))
    return model


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "kind, more",
    [
        ("olmo2", {}),
        ("granite", {"residual_multiplier": 0.5, "logits_scaling": 3.0, "attention_bias": True}),
        ("stablelm", {}),  # layer norms, rope on a part of a head
        ("exaone4", {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_the_file_computes_what_transformers_does(kind, more, tmp_path, monkeypatch, capsys):
    model = checkpoint(tmp_path / "tiny", kind, **more)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-family", f"new_{kind}", "--from", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "tensors of tiny have their place" in said
    assert f"next: ligermodels check-family tiny --import new_{kind}.py" in said
    ours, ids = AutoLiger.from_hf(tmp_path / "tiny"), torch.arange(24).view(2, 12) * 5
    expected = model.eval()(ids).logits
    torch.testing.assert_close(ours.head.logits(ours(ids)), expected, rtol=1e-4, atol=1e-5)
    text = (tmp_path / f"new_{kind}.py").read_text()
    assert "Is 1 added to\n  the weights?" in text and max(map(len, text.split("\n"))) <= 100
    assert cli.main(["new-family", f"new_{kind}", "--from", "tiny"]) == 2
    assert "is supported by" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, message",
    [
        ("phi3", "gate_up_proj.weight: the family has packed tensors: ligermodels/models/phi3.py"),
        ("starcoder2", "an MLP without a gate: examples/families/starcoder2.py"),
    ],
)
def test_what_it_cannot_begin_with_is_said(kind, message, tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path / "tiny", kind)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-family", "mine", "--from", "tiny"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "mine.py").exists()
    assert cli.main(["new-family", "no-name", "--from", "tiny"]) == 2
