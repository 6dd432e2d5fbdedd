"""A load of a broken checkpoint names the file and the key, before it reads what is large."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ligermodels import AutoLiger, CheckpointError, ConfigError, LigerLlama, LlamaConfig
from ligermodels.converters import files
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.checkpoint_files import COPIED_FILES

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


def make(folder: Path, shard: int = 5 * 10**9) -> Path:
    torch.manual_seed(0)
    LigerLlama(LlamaConfig(**SIZES)).bfloat16().save_hf(folder, max_shard_size=shard)
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return make(tmp_path / "good")


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**raw, **changes}))


def refused(folder: Path, error: type[Exception], file: str, key: str = "") -> None:
    with pytest.raises((ConfigError, CheckpointError), match=key) as caught:
        AutoLiger.from_hf(folder)
    first = str(caught.value).partition("\n")[0]
    assert caught.type is error and len(first) < 1000 and first.isprintable()
    assert first.startswith(str(folder / file) if file else f"{folder}: ")


def test_damaged_bytes_of_the_weights_are_told_by_the_header_alone(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", None)
    content = (good / SINGLE).read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    cuts = (0, 7, 8, 8 + length // 2, 8 + length, len(content) - 1)
    for damaged in (
        *(content[:cut] for cut in cuts),
        *(content[:at] + b"\xff" + content[at + 1 :] for at in (5, 8, 8 + length // 2)),
        content + b"\0",
        content[:8] + b"x" + content[9:],
    ):
        (good / SINGLE).write_bytes(damaged)
        refused(good, CheckpointError, SINGLE)
    torch.save({"a": torch.zeros(9)}, good / SINGLE)
    refused(good, CheckpointError, SINGLE, "holds pickled weights under another name; they are nev")


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
            (tensor[None], rf"{at} has shape \[1, .*\], expected \["),
            (tensor.to(torch.int8), f"{at} is stored as I8: quantised"),
            (tensor.to(torch.float8_e4m3fn), f"{at} is stored as F8_E4M3: quantised"),
        ):
            save_file(rest if replaced is None else rest | {name: replaced}, good / SINGLE)
            refused(good, CheckpointError, SINGLE, complaint)
    for name, complaint in (
        ("x.y", "'x.y' is unexpected"),
        ("\x1b[2J\n", r"'\\x1b\[2J\\n' is unexpected"),
        (f"{Q[:-6]}qweight", "q_proj.qweight' is part of a quantised weight"),
    ):
        save_file(tensors | {name: torch.zeros(1)}, good / SINGLE)
        refused(good, CheckpointError, SINGLE, complaint)


def test_values_that_are_not_finite_are_refused_unless_allowed(good: Path) -> None:
    tensors = load_file(good / SINGLE)
    for value in ("nan", "inf", "-inf"):
        tensors[Q].view(-1)[7] = float(value)
        save_file(tensors, good / SINGLE)
        refused(good, CheckpointError, SINGLE, f"'{Q}' holds NaN or infinite values")
        model = AutoLiger.from_hf(good, allow_nonfinite=True)
        assert not model.layers[1].self_attn.qkv_proj.weight.isfinite().all()


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
    for damaged, complaint in (
        *((broken, "") for broken in BROKEN_JSON),
        (b"\xef\xbb\xbf" + content, "BOM"),
        (b'{"vocab_size": 24,' + content[1:], "key 'vocab_size' appears twice"),
        (content.replace(b"24", b"9" * 5000), "too many digits"),
    ):
        (good / CONFIG).write_bytes(damaged)
        refused(good, ConfigError, CONFIG, complaint)
        (good / CONFIG).write_bytes(content)
    for changes, complaint in (
        ({"hidden_size": 2**62}, f"hidden_size is {2**62}"),
        ({"num_hidden_layers": "2"}, "'num_hidden_layers' is '2'"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"hidden_act": "\ud800"}, r"hidden_act '\\ud800' is not implemented"),
        ({"hidden_act": "x" * 10**6}, "hidden_act 'xxx"),
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


def test_files_that_may_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may open every file, so a patched os.open refuses in place of the system."""
    folder, original = make(tmp_path / "model", 4000), os.open
    for name in (CONFIG, INDEX, "model-00002-of-00003.safetensors"):

        def closed(path: Any, *args: Any, name: str = name, **options: Any) -> int:
            if os.fspath(path).endswith(name):
                raise PermissionError(13, "Permission denied")
            return original(path, *args, **options)

        error = ConfigError if name == CONFIG else CheckpointError
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "open", closed)
            refused(folder, error, name, "cannot be read: Permission denied")


def test_an_index_and_its_shards_that_disagree(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", 4000)
    content = (folder / INDEX).read_text()
    weight_map = json.loads(content)["weight_map"]
    shard = weight_map[Q]
    other = next(name for name in weight_map.values() if name != shard)
    mapped = {name: file for name, file in weight_map.items() if name != Q}
    for changed, file, complaint in (
        (weight_map | {Q: other}, INDEX, f"'{Q}' is"),
        (mapped, INDEX, f"'{Q}' is not mapped to {shard}"),
        (weight_map | {"x": shard}, shard, "'x' is missing, but .* puts it there"),
        (weight_map | {Q: "gone.safetensors"}, "gone.safetensors", "is missing, but model"),
        (weight_map | {Q: "../x.safetensors"}, INDEX, "which is not a plain .safetensors file"),
        (weight_map | {Q: 1}, INDEX, "into 1, which is not a plain .safetensors file"),
        (None, INDEX, "weight_map"),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": changed}))
        refused(folder, CheckpointError, file, complaint)
    for broken in (*BROKEN_JSON, content.encode().replace(b'"lm_', f'"{Q}": "x", "lm_'.encode())):
        (folder / INDEX).write_bytes(broken)
        refused(folder, CheckpointError, INDEX)
    (folder / INDEX).unlink()
    refused(folder, CheckpointError, INDEX, "is missing, but there are shards")
    (folder / INDEX).write_text(content)
    twice = load_file(folder / other) | {Q: torch.zeros(16, 16).bfloat16()}
    save_file(twice, folder / other)
    refused(folder, CheckpointError, INDEX, f"'{Q}' is not mapped to {other}, which holds it")
    save_file({HEAD: torch.zeros(2)}, folder / SINGLE)
    refused(folder, CheckpointError, INDEX, "which is in the same folder; one of the two is stale")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    refused(folder, CheckpointError, "", "holds no weights: neither model.safetensors nor")


def test_a_shard_that_shrinks_while_it_is_read(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file that shrinks would end the process by SIGBUS."""
    original = Checkpoint.check_aliases

    def cut(self: Checkpoint, table: Any) -> None:
        original(self, table)
        os.truncate(good / SINGLE, 3000)

    monkeypatch.setattr(Checkpoint, "check_aliases", cut)
    refused(good, CheckpointError, SINGLE, "the file was changed after its header was read")


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
