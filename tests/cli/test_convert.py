"""`ligermodels convert`: it changes dtype and shards, and compares every tensor."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors import safe_open

from ligermodels import AutoLiger, LigerLlama
from ligermodels.cli.options import byte_size
from ligermodels.layers import LoraLinear
from ligermodels.models.base import DecoderModel
from ligermodels.training.adapters import add_adapters, export_adapter, merged
from ligermodels.training.lora_options import LoraOptions
from tests.cli.helpers import SMALL, assert_one_line


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


def test_convert_replaces_files_only_with_overwrite(call, checkpoint, tmp_path, subtests):
    for name in ("config.json", "model.safetensors", "tokenizer.model", "vocab.json"):
        with subtests.test(name):
            target = tmp_path / name.partition(".")[0]
            target.mkdir(exist_ok=True)
            (target / name).write_text("mine")
            (target / "notes.txt").write_text("mine")
            result = call("convert", checkpoint, target)
            assert_one_line(result, f"the folder holds {name} of a checkpoint", "--overwrite")
            assert (target / name).read_text() == "mine"
            assert call("convert", checkpoint, target, "--overwrite")[0] == 0
            assert (target / "notes.txt").read_text() == "mine"
            AutoLiger.from_hf(target)
    (target / "merges.txt").write_text("mine")
    assert_one_line(call("convert", checkpoint, target), "more files of a checkpoint")


def test_convert_refuses_the_name_of_a_file(call, checkpoint, tmp_path):
    for name, words in (
        ("x.gguf", ["convert_hf_to_gguf.py"]),
        ("X.GGUF", ["without '.GGUF'"]),
        ("x.safetensors", ["name of a file"]),
    ):
        assert_one_line(call("convert", checkpoint, tmp_path / name), name, *words)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.bin").mkdir()
    assert call("convert", checkpoint, tmp_path / "a.bin")[0] == 0
    assert call("convert", checkpoint, tmp_path / "llama-3.2")[0] == 0


def test_convert_refuses_a_target_before_it_loads(call, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoLiger, "from_hf", None)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert_one_line(call("convert", checkpoint, tmp_path / "file"), "is a file, not a folder")
    assert_one_line(call("convert", checkpoint, tmp_path / "loop"), "loop")
    monkeypatch.chdir(tmp_path)
    assert_one_line(call("convert", checkpoint, "."), "current directory", "run from elsewhere")


def test_convert_writes_values_that_are_not_finite_if_asked(call, checkpoint, tmp_path):
    model = LigerLlama.from_hf(checkpoint)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    model.save_hf(tmp_path / "nan", allow_nonfinite=True)
    convert = ["convert", tmp_path / "nan", tmp_path / "copy", "--verify"]
    assert_one_line(call(*convert), "model.norm.weight", "allow_nonfinite")
    code, out, _ = call(*convert, "--allow-nonfinite")
    assert code == 0 and "bitwise equal" in out


def test_a_checkpoint_of_a_run_is_converted(call, checkpoint, text, tmp_path):
    run = tmp_path / "run"
    base = ["finetune", checkpoint, "--train-files", text, "--output-dir", run, "--quiet", *SMALL]
    assert call(*base, "--save-steps", "1", "--eval-fraction", "0")[0] == 0
    code, out, _ = call("convert", run / "checkpoint-2", tmp_path / "last")
    assert code == 0 and out == f"wrote the checkpoint to {tmp_path}/last\n"
    name = "model.safetensors"
    assert (tmp_path / "last" / name).read_bytes() == (run / "model" / name).read_bytes()
    first = run / "checkpoints" / "step-00000001.safetensors"
    assert call("convert", first, tmp_path / "first", "--dtype", "bfloat16")[0] == 0
    assert (tmp_path / "first/tokenizer.json").is_file()
    weight = next(AutoLiger.from_hf(tmp_path / "first").parameters())
    assert weight.dtype == torch.bfloat16
    shutil.copy(run / "checkpoints/step-00000002.safetensors", first)
    assert_one_line(call("convert", first, tmp_path / "x"), "the name says step 1, but the file")
    assert_one_line(call("convert", run / "checkpoint-7", tmp_path / "x"), "step 7; it has 1, 2")
    assert_one_line(call("convert", run / "checkpoint-2", "--verify"), "needs TARGET")


def test_an_adapter_is_converted_to_a_whole_checkpoint(call, checkpoint, tmp_path):
    model = AutoLiger.from_hf(checkpoint)
    add_adapters(model, LoraOptions(2, 4.0))
    for module in model.modules():
        if isinstance(module, LoraLinear):
            torch.nn.init.normal_(module.lora_b)
    export_adapter(model, tmp_path / "adapter", str(checkpoint), None)
    assert call("convert", tmp_path / "adapter", tmp_path / "out")[0] == 0
    expected = merged(model).state_dict()
    for name, value in AutoLiger.from_hf(tmp_path / "out").state_dict().items():
        assert torch.equal(value, expected[name])
    assert_one_line(call("convert", tmp_path / "adapter", "--verify"), "an adapter needs TARGET")
