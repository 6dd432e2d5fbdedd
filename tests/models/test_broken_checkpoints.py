"""A load of a broken checkpoint names the file and the key, before it reads what is large."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ligermodels import AutoLiger, CheckpointError, ConfigError, LigerLlama, LlamaConfig
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.files import COPIED_FILES

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Q, HEAD = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"
BROKEN_JSON = [b"", b"{", b"[]", b"\xff", b"[" * 10**5]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LigerLlama(LlamaConfig(**SIZES)).bfloat16().save_hf(tmp_path / "good")
    return tmp_path / "good"


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**raw, **changes}))


def refused(folder: Path, error: type[Exception], file: str, key: str | None = None) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=key) as caught:
        AutoLiger.from_hf(folder)
    first = str(caught.value).partition("\n")[0]
    assert caught.type is error and len(first) < 1000 and first.isprintable()
    assert first.startswith(str(folder / file) if file else f"{folder}: ")


def test_a_config_of_other_sizes_than_the_weights(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the config's size is allocated: some of these would need a terabyte."""
    monkeypatch.setattr(Checkpoint, "read", None)
    content = (good / CONFIG).read_bytes()
    for sizes, complaint in (
        ({"hidden_size": 2**20, "num_attention_heads": 2**16, "head_dim": 2**16}, "embed_tokens"),
        ({"vocab_size": 2**24, "max_position_embeddings": 2**40}, "embed_tokens"),
        ({"num_hidden_layers": 2**6}, "layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 1}, r"layers.1.*' is unexpected"),
        ({"num_key_value_heads": 4}, r"k_proj.weight' has shape \[8, 16\], expected \[16, 16\]"),
        ({"attention_bias": True}, "q_proj.bias' is missing"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' differs from 'model.embed_tokens"),
    ):
        edit_config(good, **sizes)
        refused(good, CheckpointError, SINGLE, complaint)
        (good / CONFIG).write_bytes(content)


@pytest.mark.parametrize("key", sorted(SIZES.keys() - {"num_key_value_heads"}))
def test_a_size_that_the_config_lacks_is_named(good: Path, key: str) -> None:
    raw = json.loads((good / CONFIG).read_text())
    taken = raw.pop(key) and getattr(LlamaConfig, key)
    (good / CONFIG).write_text(json.dumps(raw))
    said = f"'{key}' is missing and is taken as {taken}, .*; add it"
    refused(good, CheckpointError, CONFIG, said)


def test_code_beside_the_weights_is_not_run(good: Path, tmp_path: Path) -> None:
    code = f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\nclass Model: pass\n"
    for name in ("modeling.py", "__init__.py", "sitecustomize.py", "configuration_llama.py"):
        (good / name).write_text(code)
    auto_map = {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "configuration_llama.Model"}
    edit_config(good, auto_map=auto_map, trust_remote_code=True)
    AutoLiger.from_hf(good)
    assert not (tmp_path / "executed").exists()


def test_other_broken_files_are_kept_or_named(good: Path, tmp_path: Path) -> None:
    """A load does not read the tokenizer's files, and a generation is told about its own."""
    names = set(COPIED_FILES) - {GENERATION}
    for content in BROKEN_JSON:
        for name in names:
            (good / name).write_bytes(content)
        AutoLiger.from_hf(good).save_hf(tmp_path / "out")
        assert all((tmp_path / "out" / name).read_bytes() == content for name in names)
    for content in (*BROKEN_JSON, b'{"eos_token_id": "x"}', b'{"eos_token_id": 1e400}'):
        (good / GENERATION).write_bytes(content)
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            AutoLiger.from_hf(good).generate(torch.tensor([[1, 2]]), max_new_tokens=2)
        assert str(caught.value).startswith(str(good / GENERATION))
    shutil.rmtree(good)
    with pytest.raises(CheckpointError, match="no such folder"):
        AutoLiger.from_hf(good)
