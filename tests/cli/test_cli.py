"""Every command: its help, mistakes, exit codes, and each family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ligermodels import LigerLlama, cli
from tests.cli.helpers import SMALL, assert_one_line
from tests.models import hf_models, zoo
from tests.training.tiny_run import make_checkpoint, make_tokenizer

ROOT = Path(__file__).parents[2]
COMMANDS = [[], *([name] for name in cli.COMMANDS)]


def test_help_reads_well_at_80_columns(call, monkeypatch, subtests):
    for command in COMMANDS:
        with subtests.test(" ".join(command)):
            monkeypatch.setenv("COLUMNS", "80")
            code, out, err = call(*command, "--help")
            assert (code, err) == (0, "")
            assert out.startswith("usage: ligermodels")
            assert max(map(len, out.splitlines())) <= 80
            assert not [x for x in ("None", "SUPPRESS", "default: []") if x in out]
            if command == ["check-family"]:
                assert "seed of weights and inputs (default: 0)" in out


def test_nothing_heavy_is_imported_for_the_package_and_for_help():
    """One process imports the package and shows every help; both must stay quick."""
    heavy = ["torch", "numpy", "triton", "transformers", "huggingface_hub", "safetensors"]
    heavy += ["tokenizers", "sentencepiece", "jinja2", "tqdm", "matplotlib", "requests", "httpx"]
    code = (
        "import sys\n"
        "import ligermodels\n"
        "from ligermodels import cli\n"
        f"for command in {COMMANDS!r}:\n"
        "    assert cli.main([*command, '--help']) == 0\n"
        f"    loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "    assert not loaded, (command, loaded)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_a_mistake_in_the_arguments_is_one_line(call, subtests):
    for arguments, words in (
        ([], ["COMMAND"]),
        (["train"], ["no command 'train'"]),
        (["fintune"], ["did you mean 'finetune'?"]),
        (["finetune", "m", "--lr", "1"], ["--lr; did you mean '--learning-rate'?"]),
        (["finetune", "m", "--max-length", "9"], ["did you mean '--seq-len'?"]),
        (["generate", "m", "--temprature=1"], ["--temprature; did you mean '--temperature'?"]),
        (["generate", "m", "--dtype", "bfloat"], ["'bfloat'", "bfloat16"]),
        (
            ["generate", "m", "--repetition-penalty=1e300"],
            ["repetition_penalty: must be at most 1000000, not 1e+300"],
        ),
        (["generate", "m", "--greedy"], ["unrecognized arguments: --greedy"]),
        (["generate", "m", "--seed"], ["--seed: its value is missing"]),
        (["generate", "m", "--seed", "1.5"], ["seed: must be a whole number, not '1.5'"]),
        (["inspect", "m", "n"], ["unrecognized arguments: n"]),
        (["check-family"], ["FAMILY is missing"]),
        (["convert"], ["SOURCE", "TARGET"]),
    ):
        with subtests.test(" ".join(arguments)):
            assert_one_line(call(*arguments), *words)


@pytest.mark.parametrize("command", ["inspect", "finetune", "generate", "convert"])
def test_a_damaged_checkpoint_is_one_line_that_names_file_and_key(
    call, checkpoint, text, tmp_path, command
):
    damaged = make_checkpoint(tmp_path / "damaged")
    rest = {
        "inspect": [],
        "finetune": ["--train-files", text, "--output-dir", tmp_path / "run", "--quiet", *SMALL],
        "generate": ["hello", "--device", "cpu"],
        "convert": ["--verify"],
    }[command]
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_one_line(call(command, damaged, *rest), "model.safetensors")
    config = json.loads((damaged / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "spiral", "factor": 2.0}
    (damaged / "config.json").write_text(json.dumps(config))
    assert_one_line(call(command, damaged, *rest), "config.json", "spiral")
    (damaged / "config.json").unlink()
    assert_one_line(call(command, damaged, *rest), "config.json")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("CUDA out of memory.\nand much more"), ": CUDA out of memory."),
        (MemoryError(), ""),
    ],
)
def test_out_of_memory_is_one_line_and_exit_code_1(call, monkeypatch, error, line):
    monkeypatch.setattr(cli.inspect, "run", Mock(side_effect=error))
    assert call("inspect", "m") == (1, "", f"ligermodels: out of memory{line}\n")


def test_out_of_memory_of_a_started_process_is_left_for_the_launcher(call, monkeypatch, tmp_path):
    def explode(*_):
        raise MemoryError

    monkeypatch.setattr(cli.inspect, "run", explode)
    monkeypatch.setenv("LIGERMODELS_LAUNCHED", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert call("inspect", "m") == (1, "", "")
    assert (
        json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "out of memory"
    )


def test_an_error_of_the_system_is_one_line(call, monkeypatch):
    for error, line in (
        (OSError(28, "No space left on device", "/data/x"), "/data/x: No space left on device"),
        (OSError("the disk is odd\nand more"), "the disk is odd"),
    ):
        monkeypatch.setattr(cli.inspect, "run", Mock(side_effect=error))
        assert call("inspect", "m") == (2, "", f"ligermodels: {line}\n")


def test_a_reader_that_has_exited_is_no_error(monkeypatch, tmp_path):
    """As with `| head`; nothing that is still in the buffer may fail later."""
    monkeypatch.setattr(cli.inspect, "run", Mock(side_effect=BrokenPipeError))
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["inspect", "m"]) == 0
        print("more", flush=True)
    assert (tmp_path / "out").read_text() == ""


def test_the_allocators_options_of_the_user_stay(call, monkeypatch):
    monkeypatch.setattr(cli.inspect, "run", Mock())
    for name, given, expected in (
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", None),
        ("PYTORCH_ALLOC_CONF", "backend:native", "backend:native"),
        ("OTHER", "", "expandable_segments:True"),
    ):
        with monkeypatch.context() as patch:
            for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                patch.delenv(variable, raising=False)
            patch.setenv(name, given)
            assert call("inspect", "m")[0] == 0
            assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
            os.environ.pop("PYTORCH_ALLOC_CONF", None)


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def explode(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.inspect, "run", explode)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["inspect", "m"])


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_nan_weights_are_refused_naming_the_option_that_lets_them_in(
    call, checkpoint, tmp_path, command
):
    broken = tmp_path / "nan"
    model = LigerLlama.from_hf(checkpoint)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    model.save_hf(broken, allow_nonfinite=True)
    rest = {
        "generate": ["a", "--device", "cpu", "--max-new-tokens", "2"],
        "convert": [tmp_path / "copy", "--verify"],
    }[command]
    assert_one_line(call(command, broken, *rest), "model.norm.weight", "allow_nonfinite")
    code, _, err = call(command, broken, *rest, "--allow-nonfinite")
    if command == "generate":  # There is no likeliest token.
        assert code == 2 and err.count("\n") == 1 and "NaN or infinite" in err
    else:
        assert (code, err) == (0, "")


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_is_inspected_converted_and_continued(call, tmp_path, family):
    source, target = tmp_path / "source", tmp_path / "target"
    hf_models.save(source, family, zoo.Feature(config={"vocab_size": 263}))
    make_tokenizer(source)
    said = "2 of multi_modal_projector.*, 32 of vision_tower.*" if family == "gemma3" else None

    def assert_fine(result, *words):
        code, out, err = result
        assert code == 0 and all(word in out for word in words)
        if said is None:
            assert err == ""
        else:
            assert err.count("\n") == 1 and err.startswith("ligermodels: ") and said in err

    code, out, err = call("inspect", source, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["family"] == ("gemma3_text" if family == "gemma3" else family)
    assert bool(found["left_out"]) == (family == "gemma3")
    text = call("inspect", source)[1]
    assert ("vision_tower." in text) == (family == "gemma3")

    assert_fine(call("convert", source, "--verify"), "bitwise equal")
    options = ["--dtype", "bf16", "--max-shard-size", "20KB", "--verify"]
    assert_fine(call("convert", source, target, *options), "bitwise equal", str(target))
    assert (target / "model.safetensors.index.json").is_file()

    prompt = ["the cat", "--device", "cpu", "--max-new-tokens", "9", "--no-stream"]
    assert_fine(call("generate", source, *prompt))
    said = None  # The export contains only the text model.
    assert_fine(call("generate", target, *prompt, "--dtype", "float32"))
