"""`ligermodels inspect`: the facts it shows about a checkpoint, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors import safe_open

from ligermodels import LigerLlama
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.inspect import describe
from ligermodels.training import model
from tests.cli.helpers import assert_one_line
from tests.training.tiny_run import make_checkpoint


def sections(text: str) -> dict[str, dict[str, str]]:
    """The printed sections: a title, and below it names and values."""
    found = {}
    for part in text.split("\n\n")[1:]:
        title, *entries = part.splitlines()
        found[title] = dict(entry.strip().split("  ", 1) for entry in entries)
    return {title: {k: v.strip() for k, v in entries.items()} for title, entries in found.items()}


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_inspect_shows_family_parameters_and_memory(call, checkpoint, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", None)  # it reads no tensor
    code, out, err = call("inspect", checkpoint)
    assert (code, err) == (0, "")
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())
    assert out.splitlines()[0] == f"{checkpoint}: llama, {count:,} parameters"
    found = sections(out)
    assert found.keys() == {"config", "stored bytes by dtype", "files", "estimated memory"}
    assert found["config"]["hidden_size"] == "64"
    assert found["stored bytes by dtype"] == {"F32": f"{4 * count / 1000:.2f} kB"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= found["files"].keys()
    assert any("AdamW" in name for name in found["estimated memory"])


def test_the_json_is_the_description(call, checkpoint):
    code, out, err = call("inspect", checkpoint, "--json")
    assert (code, err) == (0, "")
    expected = asdict(describe(Path(checkpoint), LigerLlama))
    assert json.loads(out) == json.loads(json.dumps(expected, default=str))
    assert json.loads(out)["config"]["hidden_size"] == 64


def test_keys_that_nothing_reads_are_listed_apart(call, tmp_path):
    folder = make_checkpoint(tmp_path / "tiny")
    edit_config(folder, mine={"a": [1]}, **{"\x1b[2Jred": 1, "long": "x" * 600})
    code, out, _ = call("inspect", folder)
    assert code == 0 and "\x1b" not in out  # a name in the file cannot move the cursor
    unread = sections(out)["config keys that the model does not use (an export keeps them)"]
    assert unread["mine"] == '{"a": [1]}' and unread[r"'\x1b[2Jred'"] == "1"
    assert unread["long"] == '"' + "x" * 499 + " ..."


def test_a_memory_plan_is_shown_and_is_in_the_json(call, checkpoint, monkeypatch):
    pytest.importorskip("triton")
    made, outlook = {}, model.outlook  # text and JSON show one search, which takes a second

    def once(*of, **sizes):
        return made.get(str(sizes)) or made.setdefault(str(sizes), outlook(*of, **sizes))

    monkeypatch.setattr(model, "outlook", once)
    base = ["inspect", checkpoint, "--batch", 8, "--seq", 64, "--gpu", "H200", "--budget", "128MiB"]
    code, out, err = call(*base)
    assert (code, err) == (0, "")
    plan = out[out.index("training with AdamW, 8 x 64 tokens (data sheet of H200)") :]
    for words in ("2 layers keep all: 0-1", "predicted peak", "least memory: ", "largest batch"):
        assert words in plan
    found = json.loads(call(*base, "--json")[1])["memory_plan"]
    assert len(found["plan"]["layers"]) == 2 and found["budget"] == 2**27
    assert 0 < found["least_bytes"] < 2**27 and found["largest_batch"] > 8

    code, out, _ = call(*base[:-1], "1MB")
    assert code == 0 and "no plan fits 0.00 GiB" in out and "rows of 64 tokens: 0" in out
    assert_one_line(call(*base[:-3], "abacus"), "'abacus' is not known")
    assert_one_line(call(*base[:-1], "much"), "number of bytes")
