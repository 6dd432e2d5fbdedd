"""An export opens in the last transformers 4 and in the tested 5, and both compute the same.

build/ holds the older version, outside the environment; it runs in a separate process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ligermodels import LigerLlama, LlamaConfig

OLD = Path(__file__).parents[1] / "build" / "transformers-4.57.6"

SCRIPT = """
import sys, torch, transformers
from safetensors.torch import save_file
assert transformers.__version__.startswith("4."), transformers.__version__
*folders, out = sys.argv[1:]
found = {}
for folder in folders:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found[folder] = model(torch.arange(3, 67).view(2, 32)).logits
save_file(found, out)
"""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def logits_in_transformers_4(folders: list[Path], out: Path) -> dict[str, torch.Tensor]:
    if not (OLD / "transformers").is_dir():
        pytest.skip(f"{OLD.name} is not in build/: make {OLD.relative_to(OLD.parents[1])}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, folders), str(out)],
        env={**os.environ, "PYTHONPATH": str(OLD), "HF_HUB_OFFLINE": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return load_file(out)


def our_logits(folder: Path) -> torch.Tensor:
    model = LigerLlama.from_hf(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.head.logits(model(torch.arange(3, 67).view(2, 32)))


def logits_in_transformers_5(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(3, 67).view(2, 32)).logits


def export(folder: Path, scaling: dict[str, object] | None) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        # This is far from 10000, the default of a reader that ignores this key.
        rope_theta=500.0,
        rope_scaling=scaling,
        # large enough that positions change the logits
        initializer_range=0.3,
    )
    LigerLlama(config).save_hf(folder)
    return folder


# test_parity_4 opens exports of every family and feature in the default run.
@pytest.mark.long
def test_exports_open_in_both_versions(
    smollm2: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Export two configs made in Python, and the real checkpoint."""
    LigerLlama.from_hf(smollm2).save_hf(tmp_path / "smollm2")
    folders = [
        export(tmp_path / "default", None),
        export(tmp_path / "llama3", LLAMA3),
        tmp_path / "smollm2",
    ]
    old = logits_in_transformers_4(folders, tmp_path / "logits.safetensors")
    for folder in folders:
        with subtests.test(folder.name):
            ours = our_logits(folder)
            for theirs in (old[str(folder)], logits_in_transformers_5(folder)):
                assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()
