import tempfile

import pytest
import torch
from safetensors.torch import save_file

from ligermodels.converters import verify as module
from ligermodels.converters.safetensors_file import SafetensorsFile
from ligermodels.converters.verify import compare, verify
from ligermodels.models.llama import LigerLlama

from .conftest import TOKENIZER, contents, llama_config, random_tensors


@pytest.mark.parametrize(("tied", "shards"), [(True, 1), (False, 3)])
def test_a_checkpoint_survives_the_round_trip(make, tied, shards, tmp_path, monkeypatch):
    folder, config = make(shards=shards, tie_word_embeddings=tied)
    before = contents(folder)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    report = verify(folder, LigerLlama, max_shard_size=900)
    assert report.ok, str(report)
    stored = random_tensors(config)
    assert report.tensors == len(stored)
    assert report.nbytes == sum(tensor.nbytes for tensor in stored.values())
    assert set(report.files) == set(TOKENIZER)
    assert str(report).startswith(f"bitwise equal: {len(stored)} tensors")
    assert contents(folder) == before and not list(scratch.iterdir())


TIED = {"tie_word_embeddings": True}
HEAD = random_tensors(llama_config(**TIED))["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "made", [TIED | {"add": {"lm_head.weight": HEAD}}, {"rope_parameters": None}]
)
def test_a_stored_tied_head_and_a_null_rope_are_no_differences(make, made):
    folder, _ = make(**made)
    assert verify(folder, LigerLlama).ok


def test_differences_are_reported(make, monkeypatch):
    folder, _ = make()
    original = module.to_hf

    def forgetful(config):
        exported = original(config)
        del exported["is_llama_config"]
        exported["rope_theta"] = 500000
        return exported

    def wrong(checkpoint, entry, out, start=0):
        out.zero_()

    monkeypatch.setattr(module, "to_hf", forgetful)
    monkeypatch.setattr(module.Checkpoint, "read", wrong)
    report = verify(folder, LigerLlama)
    assert not report.ok
    assert "config.json: 'is_llama_config' was True and is now None" in report.differences
    assert "config.json: 'rope_theta' was 500000.0 and is now 500000" in report.differences
    assert "model.norm.weight: differs" in report.differences
    assert str(report).startswith(f"{len(report.differences)} differences in ")
    assert len(str(report).splitlines()) == 12


def test_tensors_packed_together_that_differ_in_dtype_are_reported(make):
    name = "model.layers.0.self_attn.q_proj.weight"
    folder, _ = make(add={name: torch.zeros(16, 16)})
    report = verify(folder, LigerLlama)
    assert report.differences == (
        "model.layers.0.self_attn.k_proj.weight: differs",
        "model.layers.0.self_attn.v_proj.weight: differs",
    )


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_copy_is_compared_with_what_was_cast(make, tmp_path, dtype):
    folder, _ = make()
    copy = tmp_path / "copy"
    model = LigerLlama.from_hf(folder, dtype=dtype)
    model.save_hf(copy, max_shard_size=900)
    report = compare(folder, copy, LigerLlama, dtype=dtype)
    assert report.ok, str(report)
    if dtype == torch.float16:  # only what is named keeps its dtype
        report = compare(folder, copy, LigerLlama, dtype=dtype, kept=["norm.weight"])
        assert report.differences == ("model.norm.weight: differs",)
        unchanged = compare(folder, folder, LigerLlama, dtype=dtype, kept=["norm.weight"])
        assert "model.layers.0.input_layernorm.weight: differs" in unchanged.differences
        assert "model.norm.weight: differs" not in unchanged.differences
    with torch.no_grad():
        model.norm.weight[0] += 1
    model.save_hf(copy)
    (copy / "tokenizer.json").write_text("{}")
    report = compare(folder, copy, LigerLlama, dtype=dtype)
    assert report.differences == ("model.norm.weight: differs", "tokenizer.json: differs")


def test_further_weights_that_differ_are_reported(tmp_path):
    """In a value, in a tensor that is missing, and in one that has come."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    ones = {name: torch.ones(2, 3) for name in ("same", "other", "gone")}
    save_file(ones, paths[0])
    new = {"same": torch.ones(2, 3), "other": torch.ones(2, 3) * 2, "new": torch.ones(1)}
    save_file(new, paths[1])
    found = module._added_differences(SafetensorsFile(paths[0]), paths[1], None)
    assert sorted(found) == [f"b.safetensors: {name}: differs" for name in ("gone", "new", "other")]
