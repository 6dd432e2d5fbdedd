"""Every command: its help, mistakes, exit codes, and each family."""

from __future__ import annotations

import json
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
            assert max(map(len, out.splitlines()[1:])) <= 80
            assert not [x for x in ("None", "SUPPRESS", "default: []") if x in out]
            if command == ["generate"]:
                assert "the most tokens to generate (default: 256)" in out


def test_nothing_heavy_is_imported_for_the_package_and_for_help():
    """One process imports the package and shows every help; both must stay quick."""
    heavy = ["torch", "numpy", "triton", "transformers", "huggingface_hub", "safetensors"]
    heavy += ["tokenizers", "jinja2", "tqdm", "matplotlib", "requests", "httpx"]
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


RUN = "finetune m --train-files t --output-dir o"


def test_without_a_command_the_commands_are_listed(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    assert all(f"  {command}" in out for command in cli.COMMANDS)
    assert out == call("--help")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train", "no command 'train'"),
        ("fintune", "did you mean 'finetune'?"),
        ("finetune m --lr 1", "--lr; did you mean '--learning-rate'?"),
        ("evaluate m --eval-files t", "--eval-files; did you mean '--files'?"),
        ("finetune --modle m", "--modle; MODEL is given without --modle; see"),
        ("convert m --output o", "--output; TARGET is given without --output; see"),
        ("generate m --temprature=1", "--temprature; did you mean '--temperature'?"),
        ("generate m --greedy", "unrecognized arguments: --greedy"),
        ("inspect m --dtype float32", "inspect: unrecognized arguments: --dtype"),
        ("inspect m n", "unrecognized arguments: n"),
        ("generate m --dtype bfloat", "dtype: must be one of float32, bfloat16"),
        ("generate m --repetition-penalty=0", "must be more than 0, not 0.0"),
        ("generate m --seed", "--seed: its value is missing; one that begins with -- is given as"),
        ("generate m --seed 1.5", "seed: must be a whole number, not '1.5'"),
        ("generate m p --device gpu", "device: must be cpu or cuda, not 'gpu'"),
        ("generate m p --system s", "system: this needs chat"),
        ("check-family", "FAMILY is missing"),
        ("check-family ./nothing", "./nothing: there is no such folder"),
        ("inspect", "MODEL is missing"),
        ("inspect m --batch 0", "batch: must be at least 1"),
        ("inspect m --gpu H100", "gpu: this needs batch"),
        ("inspect m --batch 8", "batch: this needs seq"),
        (f"inspect {ROOT} --revision v1", "is a local folder"),
        ("evaluate m", "give --files, --tasks, or both"),
        ("evaluate m --files f --limit 1", "limit: this needs tasks"),
        ("evaluate m --files no.txt", "no.txt: the file is missing"),
        ("convert", "SOURCE is missing"),
        ("convert m", "give TARGET, or --verify"),
        ("convert m --verify --dtype float16", "give TARGET, or --verify without --dtype"),
        ("convert m t --max-shard-size 0GB", "max_shard_size"),
        ("families bert", "unrecognized arguments: bert"),
        ("finetune", "model, train_files, output_dir: missing"),
        ("finetune --resume", "finetune: --output-dir is missing"),
        ("finetune --resume --output-dir nothere", "nothere: the folder holds no run to resume"),
        (f"{RUN} --batch-size two", "batch_size: must be a whole number, not 'two'"),
        (f"{RUN} --memory all", "memory='all'"),
        (f"{RUN} --eval-fraction nan", "eval_fraction: must be a finite number, not nan"),
        (f"{RUN} --max-steps {10**30}", "max_steps: must fit into 64 bits"),
        (f"{RUN} --beta 1", "--beta: this is only for the loss dpo"),
        (f"{RUN} --loss dop", "loss: must be one of sft, dpo"),
        (f"{RUN} --loss grpo", "reward_function: grpo needs one"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(call, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert_one_line(call(*arguments.split()), words)


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
    ("error", "code", "line"),
    [
        (RuntimeError("CUDA out of memory.\nand more"), 1, "out of memory: CUDA out of memory."),
        (MemoryError(), 1, "out of memory"),
        (OSError(28, "No space left on device", "/x"), 2, "/x: No space left on device"),
        (OSError("the disk is odd\nand more"), 2, "the disk is odd"),
    ],
)
def test_an_error_of_the_machine_is_one_line(call, monkeypatch, error, code, line):
    monkeypatch.setattr(cli.inspect, "run", Mock(side_effect=error))
    assert call("inspect", "m") == (code, "", f"ligermodels: {line}\n")


def test_a_reader_that_has_exited_is_no_error(monkeypatch, tmp_path):
    """As with `| head`; nothing that is still in the buffer may fail later."""
    monkeypatch.setattr(cli.inspect, "run", Mock(side_effect=BrokenPipeError))
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["inspect", "m"]) == 0
        print("more", flush=True)
    assert (tmp_path / "out").read_text() == ""


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli.inspect, "run", Mock(side_effect=RuntimeError("a bug")))
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_family_is_inspected_converted_and_continued(call, tmp_path, family):
    source, target = tmp_path / "source", tmp_path / "target"
    hf_models.save(source, family, zoo.Feature(config={"vocab_size": 263}))
    make_tokenizer(source)
    has_tower = family == "gemma3"
    left_out = "2 of multi_modal_projector.*, 32 of vision_tower.*"

    def output(*arguments, warns=has_tower):
        code, out, err = call(*arguments)
        assert code == 0 and err.count("\n") == warns and (left_out in err) == warns
        return out

    found = json.loads(output("inspect", source, "--json", warns=False))
    assert found["family"] == ("gemma3_text" if has_tower else family)
    assert bool(found["left_out"]) == has_tower
    assert ("vision_tower." in output("inspect", source, warns=False)) == has_tower
    options = ["--dtype", "bf16", "--max-shard-size", "20KB", "--verify"]
    for arguments, words in (
        (["--verify"], "bitwise equal"),
        ([target, *options], "after the cast"),
    ):
        assert words in output("convert", source, *arguments)
    assert (target / "model.safetensors.index.json").is_file()
    prompt = ["the cat", "--device", "cpu", "--max-new-tokens", "9"]
    output("generate", source, *prompt)
    output("generate", target, *prompt, warns=False)  # The export contains only the text model.


FAMILY = """
import ligermodels

class Config(ligermodels.LlamaConfig):
    model_type = {name!r}

@ligermodels.register
class LigerNew(ligermodels.LigerLlama):
    config_class = Config
"""


@pytest.mark.usefixtures("registry")
def test_modules_register_their_families(call, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("a_new_family", "wave"):  # They are as before after the test.
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_new_family.py").write_text(FAMILY.format(name="new_one"))
    # A file is imported even if an installed module has its name.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "wave.py").write_text(FAMILY.format(name="new_two"))
    code, out, err = call("families", "--import", "a_new_family")
    assert (code, err) == (0, "") and "new_one: LigerNew" in out
    for _ in range(2):  # finetune imports it early, too
        assert "new_two" in call("families", "--import", tmp_path / "folder" / "wave.py")[1]


def test_a_module_that_cannot_be_imported_is_one_line(call, tmp_path, subtests):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nway')")
    (tmp_path / "clash.py").write_text(FAMILY.format(name="llama"))
    (tmp_path / "json.py").write_text("")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    for name, words in (
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{tmp_path}/nothing.py", "there is no such file"),
        (f"{tmp_path}/broken.py", "RuntimeError: no"),
        (f"{tmp_path}/clash.py", "'llama' belongs to ligermodels.models.llama.LigerLlama"),
        (f"{tmp_path}/json.py", "'json' is imported already; rename the file"),
        (f"{tmp_path}/leaves.py", "SystemExit: 0"),
    ):
        with subtests.test(name):
            assert_one_line(call("families", "--import", name), f"--import {name}: ", words)
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    result = call("families", "--import", tmp_path / "slow.py")
    assert result == (130, "", "ligermodels: interrupted\n")
