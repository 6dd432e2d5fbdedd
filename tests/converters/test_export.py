import json
import os
import resource
import shutil
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ligermodels.converters import export
from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal
from ligermodels.converters.checkpoint_files import copied_files
from ligermodels.converters.export import replaced_names, save, save_adapter
from ligermodels.converters.hf_config import to_hf
from ligermodels.converters.safetensors_file import SafetensorsFile, StoredTensor
from ligermodels.converters.verify import verify
from ligermodels.errors import SaveError
from ligermodels.models.llama import LigerLlama
from tests.pairwise import pairwise

from .conftest import TOKENIZER, random_tensors


def load(folder, table):
    checkpoint = Checkpoint(folder)
    dtypes = checkpoint.plan(table)
    weights = {e.name: torch.empty(e.shape, dtype=dtypes[e.name]) for e in table}
    for entry in table:
        checkpoint.read(entry, weights[entry.name])
    return weights


def resave(folder, config, target, **options):
    table = LigerLlama.weight_map(config)
    weights = load(folder, table)
    options.setdefault("source_files", copied_files(folder))
    save(target, to_hf(config), table, weights.__getitem__, **options)


def hf_tensors(folder):
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pairwise(tied=[True, False], shards=[1, 3], dtype=[torch.bfloat16, torch.float32])
def test_round_trip_is_bitwise(make, tmp_path, tied, shards, dtype):
    max_shard_size = 5 * 10**9 if shards == 1 else 1500
    folder, config = make(shards=shards, tie_word_embeddings=tied, dtype=dtype, mlp_bias=True)
    out = tmp_path / "new" / "out"
    resave(folder, config, out, max_shard_size=max_shard_size)
    stored, exported = random_tensors(config, dtype), hf_tensors(out)
    assert stored.keys() == exported.keys() and ("lm_head.weight" in exported) == (not tied)
    assert all(bitwise_equal(stored[name], exported[name]) for name in stored)
    for name, content in TOKENIZER.items():
        assert (out / name).read_bytes() == content
    assert (out / "model.safetensors").exists() == (shards == 1)
    resave(out, config, tmp_path / "again", max_shard_size=max_shard_size)
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


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
    table = LigerLlama.weight_map(config)
    weights = load(folder, table)
    weights["norm.weight"] = torch.arange(16, dtype=torch.float64)
    weights["embed_tokens.weight"] = torch.randn(16, 24).half().t()
    odd = {"mask": StoredTensor("U8", (3,), b"abc")}
    save(tmp_path / "out", to_hf(config), table, weights.__getitem__, constants=odd)
    exported = hf_tensors(tmp_path / "out")
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert all(x.begin % exported[name].itemsize == 0 for name, x in file.tensors.items())
    assert bitwise_equal(exported["model.norm.weight"], weights["norm.weight"])
    assert bitwise_equal(exported["model.embed_tokens.weight"], weights["embed_tokens.weight"])


def test_saving_again_removes_stale_files_and_keeps_the_users(make, tmp_path):
    folder, config = make(shards=3)
    (folder / "notes.txt").write_text("mine")
    resave(folder, config, folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "notes.txt", *TOKENIZER}


def test_shards_of_other_names_that_the_old_index_lists_are_stale_too(make):
    folder, config = make(shards=2)
    path = folder / "model.safetensors.index.json"
    for old in folder.glob("*.safetensors"):
        old.rename(folder / f"part-{old.name}")
    path.write_text(path.read_text().replace("model-0", "part-model-0"))
    resave(folder, config, folder)
    assert [p.name for p in folder.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "notes.txt", "b": "../hf", "c": 5, "d": "sub/x.safetensors"}}',
        '{"weight_map": ["notes.txt"]}',
        '{"weight_map": ',
    ],
    ids=["hostile", "list", "cut"],
)
def test_a_damaged_index_is_replaced_and_names_none_of_the_users_files(make, index):
    folder, config = make()
    (folder / "notes.txt").write_text("mine")
    weights = load(folder, LigerLlama.weight_map(config))
    (folder / "model.safetensors.index.json").write_text(index)
    save(folder, to_hf(config), LigerLlama.weight_map(config), weights.__getitem__)
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "model.safetensors.index.json").exists()


def test_half_a_surrogate_pair_is_exported_unchanged(make, tmp_path):
    folder, config = make(name_of_it="\ud800", accent="é")
    resave(folder, config, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["name_of_it"] == "\ud800" and exported["accent"] == "é"


def test_a_tokenizer_of_another_model_does_not_stay(make, tmp_path):
    folder, config = make()
    (folder / "tokenizer.json").unlink()
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("another model's")
    resave(folder, config, out, source_files=None)
    assert (out / "tokenizer.json").read_text() == "another model's"  # no source
    resave(folder, config, out)
    assert not (out / "tokenizer.json").exists()
    assert (out / "tokenizer.model").read_bytes() == TOKENIZER["tokenizer.model"]


def test_additional_chat_templates_are_copied_also_onto_themselves(make, tmp_path):
    folder, config = make()
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_bytes(b"{{ tools }}\r\n")
    (templates / "notes.txt").write_text("the user's")
    out = tmp_path / "out"
    (out / templates.name).mkdir(parents=True)
    (out / templates.name / "rag.jinja").write_text("another model's")
    for target in (out, folder):
        resave(folder, config, target)
        copies = {p.name: p.read_bytes() for p in (target / templates.name).iterdir()}
        assert copies == {"tool_use.jinja": b"{{ tools }}\r\n", "notes.txt": b"the user's"}
    report = verify(folder, LigerLlama)
    assert report.ok and "additional_chat_templates/tool_use.jinja" in report.files


@pytest.mark.parametrize("fault", ["full", "file", "shape", "dtype", "size", "parent", "here"])
def test_a_failed_save_is_a_save_error_and_leaves_the_old_folder(
    make, tmp_path, monkeypatch, request, fault
):
    folder, config = make()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    target, options = folder, {}
    message = "File too large"
    if fault == "full":
        # Writes past 2000 bytes fail, as on a full disk.
        before_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before_limit[1]))
        request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before_limit))
    elif fault == "file":
        target, message = folder / "config.json", "is a file, not a folder"
    elif fault == "parent":
        target, message = folder / "config.json" / "out", "could not be saved"
    elif fault == "here":
        monkeypatch.chdir(folder)
        target, message = ".", "current directory"
    elif fault == "size":
        options, message = {"max_shard_size": 0}, "max_shard_size is 0"
    elif fault == "dtype":
        dtypes = {entry.name: torch.int8 for entry in LigerLlama.weight_map(config)}
        options, message = {"dtypes": dtypes}, "is torch.int8"
    elif fault == "shape":
        message = "shape"
        table = LigerLlama.weight_map(config)
        weights = load(folder, table)
        weights["norm.weight"] = weights["norm.weight"][:-1]
        with pytest.raises(SaveError, match=message):
            save(target, to_hf(config), table, weights.__getitem__)
    if fault != "shape":
        with pytest.raises(SaveError, match=message) as caught:
            resave(folder, config, target, **options)
        assert str(caught.value).startswith(f"{target}: ")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_saved_only_if_asked(make, tmp_path, dtype, value):
    folder, config = make(dtype=dtype)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    table = LigerLlama.weight_map(config)
    weights = load(folder, table)
    weights["layers.1.self_attn.qkv_proj.weight"][17, 3] = value  # in the rows of k
    for target in (folder, tmp_path / "new"):
        with pytest.raises(
            SaveError, match=r"layers.1.self_attn.qkv_proj.weight' .*k_proj.*NaN or"
        ):
            save(target, to_hf(config), table, weights.__getitem__)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["hf"]
    save(folder, to_hf(config), table, weights.__getitem__, allow_nonfinite=True)
    k_proj = hf_tensors(folder)["model.layers.1.self_attn.k_proj.weight"]
    assert bitwise_equal(k_proj, weights["layers.1.self_attn.qkv_proj.weight"][16:24])


def test_without_overwrite_no_file_of_a_checkpoint_is_replaced(make, tmp_path):
    folder, config = make()
    out = tmp_path / "out"
    for name in (*TOKENIZER, "config.json", "model-00001-of-00002.safetensors", "mine"):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / name).write_text("mine")
        expected = [] if name == "mine" else [name]
        assert replaced_names(out) == expected
        if name == "mine":
            resave(folder, config, out, overwrite=False)
        else:
            with pytest.raises(SaveError, match=f"{name} is in the folder, and overwrite=False"):
                resave(folder, config, out, overwrite=False)
        assert (out / name).read_text() == "mine"
    assert replaced_names(tmp_path / "absent") == [] and sorted(os.listdir(tmp_path)) == [
        "hf",
        "out",
    ]


def test_what_cannot_be_a_target_is_said_before_a_load(make, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name, message in (
        ("loop", "loop"),
        ("file", "file: a checkpoint cannot be saved here: the path is a file, not a folder"),
        ("a\0b", "embedded null"),
    ):
        with pytest.raises(SaveError, match=message):
            replaced_names(tmp_path / name)
        with pytest.raises(SaveError):
            save(tmp_path / name, {}, LigerLlama.weight_map(make()[1]), lambda _: torch.zeros(1))


def test_an_adapter_that_cannot_be_saved_leaves_the_old_folder(tmp_path, monkeypatch):
    target = tmp_path / "out"
    save_adapter(target, {"a": torch.ones(2)}, {"r": 1})
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(export, "sync_file", full)
    with pytest.raises(SaveError, match="out: the adapter could not be saved: No space left"):
        save_adapter(target, {"a": torch.ones(2)}, {"r": 2})
    with pytest.raises(SaveError, match="could not be saved: the path is a file, not a folder"):
        save_adapter(target / "adapter_config.json", {"a": torch.ones(2)}, {"r": 2})
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert os.listdir(tmp_path) == ["out"]
