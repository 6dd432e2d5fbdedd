import json
import os
import resource
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ligermodels.converters import export
from ligermodels.converters.checkpoint import bitwise_equal
from ligermodels.converters.export import replaced_names, save_adapter
from ligermodels.converters.safetensors_file import SafetensorsFile, StoredTensor
from ligermodels.converters.verify import verify
from ligermodels.errors import SaveError
from ligermodels.models.llama import LigerLlama

from .conftest import (
    TOKENIZER,
    contents,
    llama_config,
    load_weights,
    resave,
    save_weights,
    write_files,
)


def hf_tensors(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def test_shards_keep_to_the_limit_and_the_index_names_them(make, tmp_path):
    folder, config = make()
    out = tmp_path / "out"
    resave(folder, config, out, max_shard_size=700)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    held = {name: load_file(out / name) for name in files}
    mapping = {tensor: name for name, tensors in held.items() for tensor in tensors}
    assert index["weight_map"] == mapping
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in held.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    for size, tensors in zip(sizes, held.values(), strict=True):
        assert size <= 700 or len(tensors) == 1
    with safe_open(out / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_mixed_dtypes_and_strided_parameters(make, tmp_path):
    folder, config = make()
    weights = load_weights(folder, config)
    weights["norm.weight"] = torch.arange(16, dtype=torch.float64)
    weights["embed_tokens.weight"] = torch.randn(16, 24).half().t()
    odd = {"a": StoredTensor("U8", (3,), b"abc"), "b": StoredTensor("F64", (1,), bytes(8))}
    save_weights(tmp_path / "out", config, weights, constants=odd)
    exported = hf_tensors(tmp_path / "out")
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert all(x.begin % exported[name].itemsize == 0 for name, x in file.tensors.items())
    assert bitwise_equal(exported["model.norm.weight"], weights["norm.weight"])
    assert bitwise_equal(exported["model.embed_tokens.weight"], weights["embed_tokens.weight"])


@pytest.mark.parametrize("prefix", ["", "part-"])
def test_saving_again_removes_stale_files_and_keeps_the_users(make, prefix):
    """Also shards of another name, which only the old index lists."""
    folder, config = make(shards=3)
    (folder / "notes.txt").write_text("mine")
    for old in folder.glob("*.safetensors"):
        old.rename(folder / f"{prefix}{old.name}")
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-0", f"{prefix}model-0"))
    resave(folder, config, folder)
    assert {*os.listdir(folder)} == {"config.json", "model.safetensors", "notes.txt", *TOKENIZER}


@pytest.mark.parametrize(
    "shard_of",
    ['{"a": "notes.txt", "b": "../hf", "c": 5, "d": "sub/x.safetensors"}', '["notes.txt"]', ""],
)
def test_a_damaged_index_is_replaced_and_names_none_of_the_users_files(make, shard_of):
    folder, config = make()
    weights, before = load_weights(folder, config), contents(folder)
    damaged = b'{"weight_map": %s}' % shard_of.encode()
    write_files(folder, {"notes.txt": b"mine", "model.safetensors.index.json": damaged})
    save_weights(folder, config, weights)
    assert contents(folder).keys() == before.keys() | {"notes.txt"}


def test_tokenizer_files_replace_those_of_another_model(make, tmp_path):
    """Also where the target is the source."""
    folder, config = make()
    (folder / "tokenizer.json").unlink()
    tool, rag, notes = (f"additional_chat_templates/{name}" for name in ("a.jinja", "b.jinja", "n"))
    other = {"tokenizer.json": b"another model's", rag: b"another model's"}
    out = write_files(tmp_path / "out", other)
    write_files(folder, {tool: b"{{ tools }}\r\n", notes: b"the user's"})
    resave(folder, config, out, source_files=None)
    assert other.items() <= contents(out).items()
    brought = {tool: b"{{ tools }}\r\n", notes: b"the user's", **TOKENIZER}
    del brought["tokenizer.json"]
    for target in (out, folder):
        resave(folder, config, target)
        found = contents(target)
        assert brought.items() <= found.items() and not other.keys() & found.keys()
    report = verify(folder, LigerLlama)
    assert report.ok and tool in report.files


INT8 = dict.fromkeys([e.name for e in LigerLlama.weight_map(llama_config())], torch.int8)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("", {}, "File too large"),  # writes past 2000 bytes fail, as on a full disk
        ("config.json", {}, "the path is a file, not a folder"),
        ("config.json/out", {}, "could not be saved"),
        (".", {}, "current directory"),
        ("", {"max_shard_size": 0}, "max_shard_size is 0"),
        ("", {"dtypes": INT8}, "is torch.int8"),
        ("", {"norm": torch.zeros(15)}, r"of shape \[15\], expected .* \[16\]"),
    ],
)
def test_a_failed_save_is_a_save_error_and_leaves_the_old_folder(
    make, tmp_path, monkeypatch, request, target, options, message
):
    folder, config = make()
    before, weights = contents(folder), load_weights(folder, config)
    if message.startswith("File"):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
        request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    if target == ".":
        monkeypatch.chdir(folder)
    else:
        target = folder / target
    if "norm" in options:
        weights["norm.weight"], options = options["norm"], {}
    with pytest.raises(SaveError, match=message) as caught:
        save_weights(target, config, weights, **options)
    assert str(caught.value).startswith(f"{target}: ")
    assert contents(folder) == before and os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_is_saved_only_if_asked(make, tmp_path, dtype, value):
    folder, config = make(dtype=dtype)
    before, weights = contents(folder), load_weights(folder, config)
    qkv = weights["layers.1.self_attn.qkv_proj.weight"]
    qkv[17, 3] = value  # in the rows of k
    for target in (folder, tmp_path / "new"):
        with pytest.raises(SaveError, match=r"layers.1.self_attn.qkv_proj.weight' .*k_proj.*NaN"):
            save_weights(target, config, weights)
    assert contents(folder) == before and os.listdir(tmp_path) == ["hf"]
    save_weights(folder, config, weights, allow_nonfinite=True)
    k_proj = hf_tensors(folder)["model.layers.1.self_attn.k_proj.weight"]
    assert bitwise_equal(k_proj, qkv[16:24])


@pytest.mark.parametrize("name", [*TOKENIZER, "config.json", "model-00001-of-00002.safetensors"])
def test_the_names_that_a_save_replaces_are_told(tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    (out / "mine").write_text("mine")
    assert replaced_names(out) == [name] and replaced_names(tmp_path / "absent") == []


def test_what_cannot_be_a_target_is_said_before_a_load(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name, message in (
        ("loop", "loop"),
        ("file", "file: a checkpoint cannot be saved here: the path is a file, not a folder"),
        ("a\0b", "embedded null"),
    ):
        with pytest.raises(SaveError, match=message):
            replaced_names(tmp_path / name)


def test_an_adapter_that_cannot_be_saved_leaves_the_old_folder(tmp_path, monkeypatch):
    target = tmp_path / "out"
    save_adapter(target, {"a": torch.ones(2)}, {"r": 1})
    before = contents(target)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(export, "sync_file", full)
    with pytest.raises(SaveError, match="out: the adapter could not be saved: No space left"):
        save_adapter(target, {"a": torch.ones(2)}, {"r": 2})
    with pytest.raises(SaveError, match="could not be saved: the path is a file, not a folder"):
        save_adapter(target / "adapter_config.json", {"a": torch.ones(2)}, {"r": 2})
    assert contents(target) == before and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float8_holds_rows_of_any_size(dtype):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weight = (weight * torch.tensor([[0.0], [1e-3], [1.0], [50.0]])).to(dtype)
    stored, scale = export._float8(weight), export._row_scales(weight)
    torch.testing.assert_close(stored.float() * scale.float(), weight.float(), rtol=0.07, atol=1e-6)
