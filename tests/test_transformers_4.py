"""An export opens in the last transformers 4 as in the tested 5, and means the same there.

The older version lies in build/, beside the environment; it runs in a process of its own.
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
folder, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
ids = torch.arange(3, 67).view(2, 32)
with torch.no_grad():
    save_file({"logits": model(ids).logits}, out)
"""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def logits_in_transformers_4(folder: Path, out: Path) -> torch.Tensor:
    if not (OLD / "transformers").is_dir():
        pytest.skip(f"{OLD.name} is not in build/: make {OLD.relative_to(OLD.parents[1])}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(out)],
        env={**os.environ, "PYTHONPATH": str(OLD), "HF_HUB_OFFLINE": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return load_file(out)["logits"]


def our_logits(folder: Path) -> torch.Tensor:
    model = LigerLlama.from_hf(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.head.logits(model(torch.arange(3, 67).view(2, 32)))


def logits_in_transformers_5(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(3, 67).view(2, 32)).logits


def check(folder: Path, tmp_path: Path) -> None:
    ours = our_logits(folder)
    scale = ours.abs().max()
    for theirs in (
        logits_in_transformers_5(folder),
        logits_in_transformers_4(folder, tmp_path / "logits.safetensors"),
    ):
        assert (theirs - ours).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["default", "llama3"])
def test_a_config_made_here(scaling, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        # far from the 10000 that a reader falls back to
        rope_theta=500.0,
        rope_scaling=scaling,
        # weights large enough for positions to matter
        initializer_range=0.3,
    )
    LigerLlama(config).save_hf(tmp_path / "export")
    check(tmp_path / "export", tmp_path)


@pytest.mark.slow
def test_the_real_checkpoint(smollm2, tmp_path):
    LigerLlama.from_hf(smollm2).save_hf(tmp_path / "export")
    check(tmp_path / "export", tmp_path)
