"""`ligermodels convert`: it changes dtype and shards, and compares every tensor."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from ligermodels import AutoLiger, LigerLlama
from ligermodels.cli.options import byte_size
from ligermodels.models.base import DecoderModel
from tests.cli.helpers import assert_one_line


def test_a_mistake_in_the_arguments_is_one_line(call, subtests):
    for arguments, words in (
        (["convert", "m"], ["TARGET", "--verify"]),
        (["convert", "m", "--verify", "--dtype", "float16"], ["--dtype needs TARGET"]),
        (["convert", "m", "t", "--max-shard-size", "0GB"], ["not a size: '0GB'"]),
    ):
        with subtests.test(" ".join(arguments)):
            assert_one_line(call(*arguments), *words)


def test_convert_verifies_and_changes_dtype_and_shards(call, checkpoint, tmp_path):
    code, out, _ = call("convert", checkpoint, "--verify")
    assert code == 0 and "bitwise equal" in out
    target = tmp_path / "half"
    convert = ["convert", checkpoint, target, "--dtype", "bfloat16", "--max-shard-size", "20KB"]
    code, out, _ = call(*convert, "--verify")
    assert code == 0 and "bitwise equal" in out
    assert (target / "model.safetensors.index.json").is_file()
    assert (target / "tokenizer.json").is_file()
    assert next(AutoLiger.from_hf(target).parameters()).dtype == torch.bfloat16
    assert_one_line(call(*convert), "--overwrite")
    assert call(*convert, "--overwrite")[0] == 0


@pytest.mark.parametrize("size", ["500MB", "2GB", "30kB", "30000"])
def test_convert_keeps_shards_to_the_size_that_is_asked_for(call, checkpoint, tmp_path, size):
    target = tmp_path / "shards"
    code, out, err = call("convert", checkpoint, target, "--max-shard-size", size, "--verify")
    assert (code, err) == (0, "") and "bitwise equal" in out
    shards = list(target.glob("*.safetensors"))
    assert (len(shards) == 1) == size.endswith(("MB", "GB"))
    for shard in shards:
        with safe_open(shard, "pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys()]
        total = sum(tensor.nbytes for tensor in tensors)
        assert len(tensors) == 1 or total <= byte_size(size)


def test_convert_refuses_values_that_the_dtype_cannot_hold(call, checkpoint, tmp_path):
    model = LigerLlama.from_hf(checkpoint)
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    model.save_hf(tmp_path / "large")
    result = call("convert", tmp_path / "large", tmp_path / "half", "--dtype", "float16")
    assert_one_line(result, "model.norm.weight", "too large for torch.float16")
    assert not (tmp_path / "half").exists()


def test_convert_reports_a_difference_with_exit_code_1(call, checkpoint, tmp_path, monkeypatch):
    save = DecoderModel.save_hf

    def wrong(self, folder, **options):
        with torch.no_grad():
            self.norm.weight[0] += 1
        save(self, folder, **options)

    monkeypatch.setattr(DecoderModel, "save_hf", wrong)
    code, out, _ = call("convert", checkpoint, tmp_path / "copy", "--verify")
    assert code == 1 and "1 differences" in out and "model.norm.weight: differs" in out
