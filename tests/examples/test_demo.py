"""Test that the whole demo runs with a tiny model of random weights."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import torch

from ligermodels import LigerLlama, LlamaConfig

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_runs_through(smollm2, tmp_path, monkeypatch, capsys):
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
    options = ["--model", str(tmp_path / "tiny"), "--max-steps", "1"]
    options += ["--output-dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", [str(DEMO), *options])
    monkeypatch.syspath_prepend(DEMO.parent)  # as for a script
    runpy.run_path(str(DEMO), run_name="__main__")
    printed = capsys.readouterr().out
    perplexities = [float(x) for x in re.findall(r"held-out perplexity ([\d.]+)", printed)]
    assert len(perplexities) == 2  # before and after the step
    assert perplexities[-1] < perplexities[0]
    assert float(re.search(r"float32 differ by at most ([\d.e+-]+) ", printed)[1]) < 1e-4
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
