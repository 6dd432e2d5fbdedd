"""`ligermodels finetune`: every option, the output, and how a run stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin
from unittest.mock import Mock

import pytest

from ligermodels.cli import finetune, launch
from ligermodels.cli.options import CommonOptions
from ligermodels.training import reports
from ligermodels.training.config import option_names, read_config, subjects
from ligermodels.training.losses import LOSSES
from ligermodels.training.options import flat_name, types_of
from ligermodels.training.processes import Interrupted
from tests.cli.helpers import SMALL, assert_one_line
from tests.limits import SECONDS

ROOT = Path(__file__).parents[2]


def test_finetune_help_shows_every_option_and_its_default(call):
    _, out, _ = call("finetune", "--help")
    for name in option_names("sft"):
        assert ("MODEL" if name == "model" else "--" + name.replace("_", "-")) in out
    assert "--beta" not in out and "--beta" in call("finetune", "--loss", "dpo", "--help")[1]
    assert "(default, as in TRL: 1e-6" in out and "(default: 1024)" in out


def test_a_missing_or_bad_file_is_one_line_that_names_it(call, checkpoint, text, tmp_path):
    def attempt(file=text, model=checkpoint, output="run"):
        files = ["--train-files", file, "--output-dir", tmp_path / output]
        return call("finetune", model, *files, *SMALL)

    assert_one_line(attempt(tmp_path / "no.txt"), "no.txt: the file is missing")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": \n')
    assert_one_line(attempt(bad), f"{bad}:2: this is not JSON")
    assert_one_line(attempt(model=tmp_path / "no-model"), "no-model")
    assert not (tmp_path / "run" / "run.json").exists()
    for output in ("bad.jsonl", "bad.jsonl/run"):
        assert_one_line(attempt(output=output), str(tmp_path / output))


def test_finetune_says_what_came_of_it(call, checkpoint, text, tmp_path):
    output = tmp_path / "run"
    base = ["finetune", checkpoint, "--train-files", text, "--output-dir", output, *SMALL]
    base += ["--separator", ""]
    code, out, err = call(*base)
    assert code == 0
    assert "training data: " in err and "held-out loss" in err
    before = err.index("\nfine-tuning\n")
    for name, value in (
        ("parameters", r"[\d,]+ \(100%\) are trained"),
        ("device", "CPU, float32"),
        ("data", r"[\d,]+ tokens, of which [\d,]+ are learned"),
    ):
        assert re.search(rf"^{name} +.*{value}", err[before:], re.MULTILINE)
    assert out.startswith("finished\n")
    for name in ("held-out perplexity", "tokens per second", "export", "loss", "try it", "or chat"):
        assert re.search(rf"^{name}  ", out, re.MULTILINE)
    assert re.search(rf"^export +{output}/model$", out, re.MULTILINE)
    assert "\x1b[" not in out + err  # no colour in a pipe

    assert_one_line(call(*base), f"{output}: the folder holds another run")
    mistake = "seed: the run was started with 0 and cannot be resumed with 1; leave it out"
    assert_one_line(call(*base, "--resume", "--seed", "1"), mistake)
    # the run folder holds the options
    code, again, err = call("finetune", "--resume", "--output-dir", output, "--quiet")
    assert (code, again, err) == (0, out, "")
    code, out, err = call(*base, "--overwrite-output-dir", "--quiet", "--eval-fraction", "0")
    assert (code, err) == (0, "")
    assert out.startswith("finished\ntraining loss ")


def test_one_process_of_several_prints_the_result(call, monkeypatch):
    """The first one; the process that starts them prints nothing, either."""
    base = ["finetune", "m", "--train-files", "t", "--output-dir", "o"]
    module = import_module("ligermodels.training.finetune")  # the module, not the function
    monkeypatch.setattr(module, "finetune", Mock())
    monkeypatch.setattr(reports, "end", Mock(return_value={"training loss": "1.5"}))
    for rank, out in (("0", "finished\ntraining loss  1.5\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert call(*base) == (0, out, "")
    stop = Interrupted("step 3 is saved", signal.SIGTERM)
    monkeypatch.setattr(module, "finetune", Mock(side_effect=stop))
    for rank, err in (("0", "ligermodels: step 3 is saved\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert call(*base) == (128 + signal.SIGTERM, "", err)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(launch, "run", Mock())
    assert call(*base, "--gpus", "2", "--max-restarts", "1") == (0, "", "")
    launch.run.assert_called_once_with(2, 1, [*base, "--gpus", "2", "--max-restarts", "1"])


# tests/training/test_finetune.py sends both signals within a process.
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_interrupting_a_run_says_how_to_go_on(checkpoint, text, tmp_path, signum):
    output, module = tmp_path / "run", tmp_path / "a_family.py"
    module.write_text("")
    process = subprocess.Popen(
        [sys.executable, "-m", "ligermodels", "finetune", checkpoint, "--train-files", text]
        + ["--output-dir", output, *SMALL, "--max-steps", "100000", "--quiet", "--import", module],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        # A child of a background shell ignores the signal unless it sets the default handler.
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),
    )
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size > 500):
        time.sleep(0.05)
    process.send_signal(signum)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signum
    assert err.count("\n") == 1 and f"--resume --output-dir {output} --import {module}'" in err
    assert read_config(output / "run.yaml", also=[CommonOptions])["import"] == [str(module)]
    (file,) = (output / "checkpoints").iterdir()
    assert f"the state after step {int(file.name[5:])} is saved" in err


LOSS = """
from ligermodels.training.losses import SFT

class Mine(SFT, name="mine"):
    pass
"""


def test_resuming_with_a_loss_of_ones_own_needs_its_import(
    call, checkpoint, text, tmp_path, monkeypatch
):
    from ligermodels.training.losses import LOSSES

    monkeypatch.setattr(sys, "path", sys.path[:])
    module, output = tmp_path / "mine_for_a_run.py", tmp_path / "run"
    module.write_text(LOSS)
    files = [checkpoint, "--train-files", text, "--loss", "mine"]
    resume = ["finetune", "--resume", "--output-dir", output]
    try:
        words = [*files, "--output-dir", output, *SMALL, "--quiet", "--import", module]
        assert call("finetune", *words)[0] == 0
        del LOSSES["mine"]  # as in another process
        assert_one_line(call(*resume), "the run has a loss 'mine'", "(--import FILE.py)")
        assert call(*resume, "--quiet", "--import", module)[0] == 0
    finally:
        LOSSES.pop("mine", None)


def test_preferences_and_rewards(call, checkpoint, tmp_path):
    pairs, rewards = tmp_path / "pairs.jsonl", tmp_path / "rewards.py"
    pairs.write_text('{"prompt": "ab", "chosen": "c", "rejected": "d"}\n' * 8)
    rewards.write_text("def short(completions, **_):\n    return [-len(x) for x in completions]\n")
    files = ["--train-files", pairs, "--quiet", *SMALL]
    code, out, _ = call(
        "finetune", checkpoint, *files, "--output-dir", tmp_path / "dpo", "--loss", "dpo"
    )
    assert code == 0 and re.search("held-out reward accuracy +0.0000 -> ", out)
    grpo = ["--loss", "grpo", "--num-generations", "2", "--max-completion-length", "4"]
    code, out, _ = call(
        *("finetune", checkpoint, *files, "--output-dir", tmp_path / "grpo", *grpo),
        *("--reward-function", f"{rewards}:short", "--eval-steps", "9"),
    )
    assert code == 0 and "held-out reward " in out


def test_a_config_file_sets_any_option_and_a_run_writes_its_own(call, checkpoint, text, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        f"model: {checkpoint}\ntrain_files: {text}\noutput-dir: {tmp_path}/a\nseq_len: 64\n"
        "batch_size: 2\nmax_steps: 2\nlearning_rate: 1e-3\nmax_shard_size: 5GB\n"
        "device: cpu\nactivation_checkpointing: true\nquiet: true\ngpus: null\n"
    )
    code, out, err = call("finetune", "--config", file)
    assert (code, err) == (0, "") and re.search("^steps +2$", out, re.M)
    code, again, _ = call(
        "finetune", "--config", tmp_path / "a/run.yaml", "--output-dir", tmp_path / "b", "--quiet"
    )
    weights = "model/model.safetensors"
    told = [re.sub("second +[0-9,]+", "", each) for each in (out.replace("/a/", "/b/"), again)]
    assert told[0] == told[1]
    assert (tmp_path / "a" / weights).read_bytes() == (tmp_path / "b" / weights).read_bytes()
    # An option on the command line wins, also a switch that is turned off.
    code, other, _ = call(
        *("finetune", "--config", file, "--output-dir", tmp_path / "c", "--max-steps", "1"),
        "--no-activation-checkpointing",
    )
    assert code == 0 and re.search("^steps +1$", other, re.M)
    assert "activation_checkpointing: false" in (tmp_path / "c/run.yaml").read_text()
    settings = (tmp_path / "a/run.yaml").read_text()
    assert "  learning_rate: 0.001" in settings and "quiet" not in settings

    for wrong, words in (
        ("learning_rat: 1", "own.yaml:1: learning_rat is no option; did you mean 'learning_rate'?"),
        ("gpus: two", "gpus: must be a whole number, not 'two'"),
        ("gpus: 10000000000", "gpus: must be at most 1024"),
        ("import: no_such_module", "--import no_such_module: "),
        ("import: [[a]]", "import: must be a text, not ['a']"),
    ):
        file.write_text(f"{wrong}\n")
        assert_one_line(call("finetune", "--config", file), words)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_option_of_finetune_sets_its_field(loss):
    """All are given at once, each with another value than its default."""
    words, wanted = ["MODEL", "--loss", loss], {"model": "MODEL", "loss": loss}
    for kind in subjects(loss).values():
        types = types_of(kind)
        for each in fields(kind):
            name = flat_name(each)
            if name in ("model", "resume"):
                continue
            option, value = name.replace("_", "-"), another_value(each, types[name])
            if isinstance(value, bool):
                words.append(f"--{option}" if value else f"--no-{option}")
            else:
                values = value if isinstance(value, list) else [value]
                words += [f"--{option}", *map(str, values)]
            wanted[name] = value
    assert finetune.parse_arguments(words).options == wanted


def another_value(each: Field[Any], kind: Any) -> Any:
    """Return a value of an option that differs from its default and keeps its limits."""
    choices = each.metadata["choices"]
    item, *_ = get_args(kind) or (kind,)
    if item is bool:
        return not each.default
    if choices is not None:
        value = next(choice for choice in choices if choice != each.default)
    elif item is str:
        value = "64MiB" if each.name == "budget" else "other"
    else:
        value = (each.default or 1) + 1 if item is int else (each.default or 0.5) / 2
    return [value] if get_origin(kind) is list else value
