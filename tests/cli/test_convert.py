"""`ligermodels convert`: it changes dtype and shards, and compares every tensor."""

from __future__ import annotations

import shutil

import torch
from safetensors.torch import load_file

from ligermodels import AutoLiger
from ligermodels.adapters import LoraLinear
from ligermodels.adapters.adapted_model import add_adapters, export_adapter, merged
from ligermodels.heads.medusa import MedusaHeads
from ligermodels.heads.medusa_file import HEADS_NAME, save_heads
from ligermodels.models.base import DecoderModel
from tests.cli.helpers import SMALL, assert_one_line
from tests.training.tiny_run import make_checkpoint


def test_convert_verifies_and_changes_dtype_and_shards(call, checkpoint, tmp_path):
    target = tmp_path / "half"
    convert = ["convert", checkpoint, target, "--dtype", "bfloat16", "--max-shard-size", "20KB"]
    for arguments in (["convert", checkpoint], convert):
        code, out, _ = call(*arguments, "--verify")
        words = "equal after the cast to bfloat16" if "--dtype" in arguments else "bitwise equal"
        assert code == 0
        other = target if "--dtype" in arguments else "its own export"
        *_, what, verdict = out.splitlines()
        assert what == f"compared: {checkpoint} with {other}" and verdict.startswith(f"{words}: ")
    assert (target / "model.safetensors.index.json").is_file()
    assert (target / "tokenizer.json").is_file()
    assert next(AutoLiger.from_hf(target).parameters()).dtype == torch.bfloat16
    assert_one_line(call(*convert), "--overwrite")
    assert call(*convert, "--overwrite")[0] == 0


def test_convert_reports_a_difference_with_exit_code_1(call, checkpoint, tmp_path, monkeypatch):
    save = DecoderModel.save_hf

    def wrong(self, folder, **options):
        with torch.no_grad():
            self.norm.weight[0] += 1
        save(self, folder, **options)

    monkeypatch.setattr(DecoderModel, "save_hf", wrong)
    code, out, _ = call("convert", checkpoint, tmp_path / "copy", "--verify")
    assert code == 1 and "1 difference in" in out and "model.norm.weight: differs" in out


def test_convert_writes_float8(call, checkpoint, tmp_path):
    wide = make_checkpoint(tmp_path / "wide", hidden_size=1024, num_hidden_layers=1)
    target = tmp_path / "float8"
    convert = ["convert", wide, target, "--dtype", "bfloat16", "--float8"]
    assert_one_line(call(*convert, "--verify"), "--float8 rounds the weights")
    assert call(*convert)[0] == 0
    stored = load_file(target / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert stored[name].dtype == torch.float8_e4m3fn
    assert stored[f"{name}_scale"].shape == (1024, 1)
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16  # 96 features
    assert_one_line(call("convert", checkpoint, tmp_path / "no", "--float8"), "fewer than 1024")


def test_convert_replaces_files_only_with_overwrite(call, checkpoint, tmp_path):
    for name in ("notes.txt", "config.json"):
        (tmp_path / name).write_text("mine")
    holds = "the folder holds config.json of a checkpoint"
    assert_one_line(call("convert", checkpoint, tmp_path), holds, "--overwrite")
    assert (tmp_path / "config.json").read_text() == "mine"
    assert call("convert", checkpoint, tmp_path, "--overwrite")[0] == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    AutoLiger.from_hf(tmp_path)


def test_convert_refuses_the_name_of_a_file(call, checkpoint, tmp_path):
    for name in ("X.GGUF", "x.safetensors"):
        said = "this is the name of a file"
        assert_one_line(call("convert", checkpoint, tmp_path / name), name, said)
    assert list(tmp_path.iterdir()) == []
    result = call("convert", checkpoint, checkpoint, "--overwrite", "--verify")
    assert_one_line(result, "--verify compares two folders")
    (tmp_path / "a.bin").mkdir()
    for name in ("a.bin", "llama-3.2"):
        assert call("convert", checkpoint, tmp_path / name)[0] == 0


def test_a_checkpoint_of_a_run_is_converted(call, checkpoint, text, tmp_path):
    run = tmp_path / "run"
    base = ["finetune", checkpoint, "--train-files", text, "--output-dir", run, "--quiet", *SMALL]
    assert call(*base, "--save-steps", "1", "--eval-fraction", "0")[0] == 0
    code, out, _ = call("convert", run / "checkpoint-2", tmp_path / "last")
    assert code == 0 and out == f"wrote the checkpoint to {tmp_path}/last\n"
    name = "model.safetensors"
    assert (tmp_path / "last" / name).read_bytes() == (run / "model" / name).read_bytes()
    first = run / "checkpoints" / "step-00000001"
    assert call("convert", first, tmp_path / "first", "--dtype", "bfloat16")[0] == 0
    assert (tmp_path / "first/tokenizer.json").is_file()
    weight = next(AutoLiger.from_hf(tmp_path / "first").parameters())
    assert weight.dtype == torch.bfloat16
    assert_one_line(call("convert", run / "checkpoint-7", tmp_path / "x"), "step 7; it has 1, 2")
    unverified = "a checkpoint of a run, or an adapter, cannot be verified; give TARGET"
    assert_one_line(call("convert", run / "checkpoint-2", "--verify"), unverified)


def with_heads(checkpoint, folder):
    """Copy a checkpoint, and put heads beside it."""
    shutil.copytree(checkpoint, folder)
    heads = MedusaHeads(AutoLiger.from_hf(folder).head, 2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(heads, folder)
    return folder / HEADS_NAME


def test_heads_are_converted_with_their_model(call, checkpoint, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    file = with_heads(checkpoint, source)
    code, out, _ = call("convert", source, target, "--verify")
    stored = load_file(file)
    count = len(stored) + len(load_file(source / "model.safetensors"))
    assert code == 0 and f"bitwise equal: {count} tensors" in out
    for name, x in load_file(target / HEADS_NAME).items():
        assert torch.equal(x, stored[name])
    assert f"bitwise equal: {count} tensors" in call("convert", source, "--verify")[1]

    half = [source, target, "--dtype", "float16"]
    assert_one_line(call("convert", *half), "--overwrite")
    assert call("convert", *half, "--overwrite", "--verify")[0] == 0
    assert {x.dtype for x in load_file(target / HEADS_NAME).values()} == {torch.float16}
    # Heads that belong to the replaced model do not stay.
    assert call("convert", checkpoint, target, "--overwrite")[0] == 0
    assert not (target / HEADS_NAME).exists()


def test_weights_that_would_be_lost_are_refused(call, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "source")
    for name in ("value_head.safetensors", "adapter_config.json"):
        (tmp_path / "source" / name).touch()
        for arguments in ([tmp_path / "out"], ["--verify"]):
            result = call("convert", tmp_path / "source", *arguments)
            assert_one_line(result, f"{tmp_path}/source/{name}", "would lose")
        (tmp_path / "source" / name).unlink()
    assert not (tmp_path / "out").exists()


def test_what_is_not_converted_is_said(call, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "source")
    for name in ("README.md", "pytorch_model.bin", "optimizer.pt", ".gitattributes"):
        (tmp_path / "source" / name).write_bytes(b"")
    code, _, err = call("convert", tmp_path / "source", tmp_path / "out")
    assert code == 0
    assert err == "ligermodels: not converted: README.md, optimizer.pt, pytorch_model.bin\n"


def test_an_adapter_is_converted_to_a_whole_checkpoint(call, checkpoint, tmp_path):
    model = AutoLiger.from_hf(checkpoint)
    add_adapters(model, 2, 4.0)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            torch.nn.init.normal_(module.lora_b)
    export_adapter(model, adapter := tmp_path / "adapter", str(checkpoint), None)
    (adapter / "chat_template.jinja").write_text("hello")
    assert call("convert", adapter, tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "hello"
    expected = merged(model).state_dict()
    for name, value in AutoLiger.from_hf(tmp_path / "out").state_dict().items():
        assert torch.equal(value, expected[name])
    unverified = "a checkpoint of a run, or an adapter, cannot be verified; give TARGET"
    for target in ((), (tmp_path / "o",)):
        assert_one_line(call("convert", adapter, *target, "--verify"), unverified)
    (adapter / "extra.safetensors").touch()
    assert_one_line(call("convert", adapter, tmp_path / "o"), "extra.safetensors", "would lose")
