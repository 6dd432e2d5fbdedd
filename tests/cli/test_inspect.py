"""`ligermodels inspect`: what it shows of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open


def test_inspect_shows_family_parameters_and_memory(call, checkpoint):
    code, out, err = call("inspect", checkpoint)
    assert (code, err) == (0, "")
    assert "llama" in out.splitlines()[0] and "parameters" in out.splitlines()[0]
    assert "hidden_size" in out and "AdamW" in out
    code, out, _ = call("inspect", checkpoint, "--json")
    found = json.loads(out)
    assert found["family"] == "llama" and found["config"]["hidden_size"] == 64
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())
    assert found["parameters"] == count
