"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ligermodels import LigerLlama, cli
from ligermodels.cli.options import byte_size
from tests.models import hf_models, zoo
from tests.training.tiny_run import make_checkpoint, make_text, make_tokenizer

ROOT = Path(__file__).parents[2]
SMALL = ["--seq-len", "64", "--batch-size", "2", "--steps", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(make_text(tmp_path_factory.mktemp("text") / "words.txt"))


@pytest.fixture
def call(capfd):
    """Runs the command line: (exit code, stdout, stderr)."""

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


def assert_one_line(result, *words):
    """Exit code 2, nothing on stdout, one line on stderr with these words."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err


# Help and mistakes in the arguments


@pytest.mark.parametrize(
    "command", [[], ["finetune"], ["generate"], ["inspect"], ["convert"], ["families"]]
)
def test_help_reads_well_at_80_columns(call, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: ligermodels")
    assert max(map(len, out.splitlines())) <= 80
    assert "None" not in out and "SUPPRESS" not in out


def test_finetune_help_shows_every_option_and_its_default(call):
    from dataclasses import fields

    from ligermodels.training.finetune import FinetuneConfig

    _, out, _ = call("finetune", "--help")
    for each in fields(FinetuneConfig):
        assert ("MODEL" if each.name == "model" else "--" + each.name.replace("_", "-")) in out
    assert "(default: 2e-05)" in out and "(default: 1024)" in out


def test_help_is_shown_without_loading_anything_heavy():
    code = (
        "import sys\n"
        "from ligermodels import cli\n"
        "before = set(sys.modules)\n"
        "cli.main(['finetune', '--help'])\n"
        "heavy = {'transformers', 'triton', 'matplotlib', 'huggingface_hub', 'jinja2', 'tqdm'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["train"], ["invalid choice: 'train'"]),
        (["finetune", "m", "--train", "t"], ["--output is missing"]),
        (["finetune", "m", "--output", "o"], ["--train is missing"]),
        (["finetune", "--train", "t", "--output", "o"], ["MODEL is missing"]),
        (["finetune", "m", "--batch-size", "two"], ["--batch-size", "invalid int value: 'two'"]),
        (["finetune", "m", "--precision", "fp8"], ["--precision", "bf16-mixed"]),
        (["finetune", "m", "--max-shard-size", "big"], ["not a size: 'big'"]),
        (
            ["finetune", "m", "--train", "t", "--output", "o", "--seq-len", "1"],
            ["--seq-len: ", "at least 2"],
        ),
        (["generate", "m", "p", "--temperature", "-1"], ["--temperature"]),
        (["generate", "m", "p", "--top-p", "1.5"], ["--top-p", "at most 1"]),
        (["generate", "m", "p", "--max-new-tokens", "0"], ["--max-new-tokens", "at least 1"]),
        (["generate", "m", "p", "--system", "s"], ["--system", "--chat"]),
        (["convert", "m"], ["TARGET", "--verify"]),
        (["convert", "m", "--verify", "--dtype", "float16"], ["--dtype needs TARGET"]),
        (["convert", "m", "t", "--max-shard-size", "0GB"], ["not a size: '0GB'"]),
        (["families", "bert"], ["'bert'", "llama"]),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line(call, arguments, words):
    assert_one_line(call(*arguments), *words)


# Mistakes in the files


def test_a_missing_or_bad_file_is_one_line_that_names_it(call, checkpoint, text, tmp_path):
    def finetune(*files, model=checkpoint):
        return call("finetune", model, "--train", *files, "--output", tmp_path / "run", *SMALL)

    assert_one_line(finetune(tmp_path / "no.txt"), "no.txt: no such file")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": \n')
    assert_one_line(finetune(bad), f"{bad}:2: not JSON")
    assert_one_line(finetune(text, model=tmp_path / "no-model"), "no-model")
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("command", ["inspect", "finetune", "generate", "convert"])
def test_a_damaged_checkpoint_is_one_line_that_names_file_and_key(
    call, checkpoint, text, tmp_path, command
):
    damaged = make_checkpoint(tmp_path / "damaged")
    rest = {
        "inspect": [],
        "finetune": ["--train", text, "--output", tmp_path / "run", "--quiet", *SMALL],
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


# finetune


def test_finetune_says_what_came_of_it(call, checkpoint, text, tmp_path):
    output = tmp_path / "run"
    base = ["finetune", checkpoint, "--train", text, "--separator", "", "--output", output, *SMALL]
    code, out, err = call(*base)
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("held-out perplexity ") and first.endswith("in 2 steps")
    assert second == f"exported to {output}/model"
    assert "training data: " in err and "held-out loss" in err and "tokens/s" in err

    assert_one_line(call(*base), f"{output}: holds another run")
    assert_one_line(call(*base, "--resume", "--seed", "1"), "seed: the run was started with 0")
    # the options of the run are remembered
    code, again, err = call("finetune", "--resume", "--output", output, "--quiet")
    assert (code, again, err) == (0, out, "")
    code, out, err = call(*base, "--overwrite", "--quiet", "--eval-fraction", "0")
    assert (code, err) == (0, "")
    assert out.startswith("training loss ")


def test_an_output_that_cannot_be_written_is_one_line(call, checkpoint, text, tmp_path):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        result = call("finetune", checkpoint, "--train", text, "--output", output, *SMALL)
        assert_one_line(result, str(output))


def test_interrupting_a_run_says_how_to_go_on(checkpoint, text, tmp_path):
    output = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "ligermodels", "finetune", checkpoint, "--train", text]
        + ["--output", output, *SMALL, "--steps", "100000", "--quiet"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size > 500):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.count("\n") == 1 and f"--resume --output {output}" in err


def test_out_of_memory_is_one_line_and_exit_code_1(call, monkeypatch):
    def explode(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand much more")

    monkeypatch.setattr(cli.inspect, "run", explode)
    code, _, err = call("inspect", "m")
    assert code == 1 and err.count("\n") == 1 and "Tried to allocate" in err


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def explode(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.inspect, "run", explode)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["inspect", "m"])


# what the library calls by its arguments' names, the command line calls by its options


def test_messages_name_options_as_they_are_typed():
    given = argparse.Namespace(allow_nonfinite=False, seq_len=1, model="m", module=None)
    for message, shown in (
        (
            "a.safetensors: 'w' holds NaN; allow_nonfinite=True lets them in",
            "a.safetensors: 'w' holds NaN; --allow-nonfinite lets them in",
        ),
        ("seq_len: must be at least 2", "--seq-len: must be at least 2"),
        ("model: is a positional", "model: is a positional"),
        ("config.json: 'seq_len: 1' is unknown", "config.json: 'seq_len: 1' is unknown"),
        ("rope_theta: is no option", "rope_theta: is no option"),
        ("a: b; strict=True says so; and more", "a: b; and more"),
    ):
        assert cli.in_flags(message, given) == shown


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_nan_weights_are_refused_naming_the_option_that_lets_them_in(
    call, checkpoint, tmp_path, command
):
    broken = tmp_path / "nan"
    model = LigerLlama.from_hf(checkpoint)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    model.save_hf(broken)
    rest = {
        "generate": ["a", "--device", "cpu", "--max-new-tokens", "2"],
        "convert": [tmp_path / "copy", "--verify"],
    }[command]
    result = call(command, broken, *rest)
    assert_one_line(result, "model.norm.weight", "--allow-nonfinite")
    assert "allow_nonfinite" not in result[2]
    code, _, err = call(command, broken, *rest, "--allow-nonfinite")
    assert (code, err) == (0, "")


def test_an_unknown_device_is_one_line(call, checkpoint):
    assert_one_line(call("generate", checkpoint, "a", "--device", "tpu"), "--device: ", "'tpu'")


# generate


def test_generate_continues_a_prompt_streaming_or_not(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "8", "--device", "cpu"]
    code, streamed, err = call(*base)
    assert (code, err) == (0, "")
    assert streamed.endswith("\n")
    assert call(*base, "--no-stream") == (0, streamed, "")


def test_generate_samples_with_a_seed(call, checkpoint):
    base = ["generate", checkpoint, "the cat", "--max-new-tokens", "12", "--device", "cpu"]
    sampling = ["--temperature", "5", "--top-k", "100", "--top-p", "0.99", "--seed"]
    one, same, other = (call(*base, *sampling, seed)[1] for seed in (1, 1, 2))
    assert one == same != other


def test_generate_reads_stdin_and_chats(call, checkpoint, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    piped = call("generate", checkpoint, "--max-new-tokens", "4", "--device", "cpu")
    assert piped[0] == 0 and piped[1]
    chat = ["generate", checkpoint, "hello", "--chat", "--system", "be brief", "--device", "cpu"]
    code, out, err = call(*chat, "--max-new-tokens", "4")
    assert (code, err) == (0, "") and out


def test_a_conversation_goes_on_until_the_end_of_input(call, checkpoint, monkeypatch):
    from ligermodels.text.tokenizer import Tokenizer

    shown = []
    render = Tokenizer.apply_chat_template

    def watched(self, messages, **options):
        shown.append([message["role"] for message in messages])
        return render(self, messages, **options)

    turns = iter(["hello", "and you?"])

    def answer(_):
        for turn in turns:
            return turn
        raise EOFError

    monkeypatch.setattr(Tokenizer, "apply_chat_template", watched)
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    chat = ["generate", checkpoint, "--chat", "--device", "cpu", "--max-new-tokens", "3"]
    code, _, err = call(*chat)
    assert (code, err) == (0, "")
    assert shown == [["user"], ["user", "assistant", "user"]]


def test_generate_refuses_what_it_cannot_continue(call, checkpoint, tmp_path):
    base = ["generate", checkpoint, "", "--device", "cpu"]
    assert_one_line(call(*base), "generate: ")
    bare = make_checkpoint(tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert_one_line(call("generate", bare, "hi", "--chat", "--device", "cpu"), "no chat template")
    code, _, err = call(*base[:2], "cat", "--device", "cpu", "--max-new-tokens", "300")
    assert code == 0 and "max_position_embeddings" in err


# inspect and convert


def test_inspect_shows_family_parameters_and_memory(call, checkpoint):
    code, out, err = call("inspect", checkpoint)
    assert (code, err) == (0, "")
    assert "llama" in out.splitlines()[0] and "parameters" in out.splitlines()[0]
    assert "hidden_size" in out and "AdamW" in out
    code, out, _ = call("inspect", checkpoint, "--json")
    found = json.loads(out)
    assert found["family"] == "llama" and found["config"]["hidden_size"] == 64
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())
    assert found["parameters"] == count


def test_convert_verifies_and_changes_dtype_and_shards(call, checkpoint, tmp_path):
    code, out, _ = call("convert", checkpoint, "--verify")
    assert code == 0 and "bitwise equal" in out
    target = tmp_path / "half"
    convert = ["convert", checkpoint, target, "--dtype", "bfloat16", "--max-shard-size", "20KB"]
    code, out, _ = call(*convert, "--verify")
    assert code == 0 and "bitwise equal" in out
    assert (target / "model.safetensors.index.json").is_file()
    assert (target / "tokenizer.json").is_file()
    from ligermodels import AutoLiger

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
    from ligermodels.models.base import DecoderModel

    save = DecoderModel.save_hf

    def wrong(self, folder, **options):
        with torch.no_grad():
            self.norm.weight[0] += 1
        save(self, folder, **options)

    monkeypatch.setattr(DecoderModel, "save_hf", wrong)
    code, out, _ = call("convert", checkpoint, tmp_path / "copy", "--verify")
    assert code == 1 and "1 differences" in out and "model.norm.weight: differs" in out


# Every family


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

    code, out, err = call("convert", source, "--verify")
    assert (code, err) == (0, "") and "bitwise equal" in out
    options = ["--dtype", "bfloat16", "--max-shard-size", "20KB", "--verify"]
    assert_fine(call("convert", source, target, *options), "bitwise equal", str(target))
    assert (target / "model.safetensors.index.json").is_file()

    prompt = ["the cat", "--device", "cpu", "--max-new-tokens", "9", "--no-stream"]
    assert_fine(call("generate", source, *prompt))
    said = None  # the export is of the text model alone
    assert_fine(call("generate", target, *prompt, "--dtype", "float32"))


def test_resuming_where_no_run_is(call, tmp_path):
    result = call("finetune", "--resume", "--output", tmp_path / "nothere")
    assert_one_line(result, "nothere: holds no run to resume")
