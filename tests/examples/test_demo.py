"""Test that the whole demo runs with a tiny model of random weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from ligermodels import LigerLlama, LlamaConfig

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_runs_through(smollm2, tmp_path):
    torch.manual_seed(0)
    model = LigerLlama(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    )
    model.save_hf(tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, tmp_path / "tiny" / name)
    command = [sys.executable, str(DEMO), "--model", str(tmp_path / "tiny"), "--max-steps", "1"]
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(DEMO.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    perplexities = [float(x) for x in re.findall(r"held-out perplexity ([\d.]+)", done.stdout)]
    assert len(perplexities) == 2  # before and after the step
    assert perplexities[-1] < perplexities[0]
    assert float(re.search(r"float32 differ by at most ([\d.e+-]+) ", done.stdout)[1]) < 1e-4
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
