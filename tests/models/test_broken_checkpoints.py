"""A load of a broken checkpoint names the file and the key, before it reads what is large."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_tensors_that_do_not_fit_the_model_are_named_before_a_read(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", None)
    tensors = load_file(good / SINGLE)
    for name, tensor in tensors.items():
        rest = {other: x for other, x in tensors.items() if other != name}
        at = re.escape(f"'{name}'")
        for replaced, complaint in (
            (None, f"{at} is missing"),
            (tensor[:-1], rf"{at} has shape \[.*\], expected \["),
            (tensor.to(torch.float8_e4m3fn), f"{at} is stored as F8_E4M3: quantised"),
        ):
            save_file(rest if replaced is None else rest | {name: replaced}, good / SINGLE)
            refused(good, CheckpointError, SINGLE, complaint)
    save_file(tensors | {"\x1b[2J\n": torch.zeros(1)}, good / SINGLE)
    refused(good, CheckpointError, SINGLE, r"'\\x1b\[2J\\n' is unexpected")


def test_a_config_of_other_sizes_than_the_weights(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the config's size is allocated: some of these would need a terabyte."""
    monkeypatch.setattr(Checkpoint, "read", None)
    content = (good / CONFIG).read_bytes()
    for sizes, complaint in (
        ({"hidden_size": 2**20, "num_attention_heads": 2**16, "head_dim": 2**16}, "embed_tokens"),
        ({"vocab_size": 2**24, "max_position_embeddings": 2**40}, "embed_tokens"),
        ({"num_hidden_layers": 2**10}, "layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 1}, r"layers.1.*' is unexpected"),
        ({"num_key_value_heads": 4}, r"k_proj.weight' has shape \[8, 16\], expected \[16, 16\]"),
        ({"attention_bias": True}, "q_proj.bias' is missing"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' differs from 'model.embed_tokens"),
    ):
        edit_config(good, **sizes)
        refused(good, CheckpointError, SINGLE, complaint)
        (good / CONFIG).write_bytes(content)


def test_a_config_that_no_model_has_is_refused_before_the_weights_are_opened(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/models/test_config.py has the values that each field cannot have."""
    monkeypatch.setattr(Checkpoint, "__init__", None)
    content = (good / CONFIG).read_bytes()
    for broken in BROKEN_JSON:
        (good / CONFIG).write_bytes(broken)
        refused(good, ConfigError, CONFIG)
        (good / CONFIG).write_bytes(content)
    for changes, complaint in (
        ({"hidden_size": 2**62}, f"hidden_size is {2**62}"),
        ({"num_hidden_layers": "2"}, "'num_hidden_layers' is '2'"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"hidden_act": "\ud800"}, r"hidden_act '\\ud800' is not implemented"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type' is 'spiral'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised checkpoints \('gptq'\)"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
    ):
        edit_config(good, **changes)
        refused(good, ConfigError, CONFIG, complaint)
        (good / CONFIG).write_bytes(content)


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "not a regular file but a pipe"),
    "folder": (os.mkdir, "not a regular file but a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file but a device"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which does not"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_read_is_never_taken_as_absent(good: Path, kind: str) -> None:
    """If a tokenizer file counted as absent, a save would drop it without a word."""
    create, message = KINDS[kind]
    for name in (CONFIG, SINGLE, INDEX, *COPIED_FILES, "additional_chat_templates/rag.jinja"):
        path, kept = good / name, good.with_name("kept")
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path.rename(kept)
        create(path)
        refused(good, ConfigError if name == CONFIG else CheckpointError, name, message)
        path.rmdir() if kind == "folder" else path.unlink()
        if kept.exists():
            kept.rename(path)
    AutoLiger.from_hf(good)


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
