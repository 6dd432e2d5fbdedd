"""Attacks on what the commands read and write besides models and data: configs, loggers, bars."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.attack.attacks_sources import GRPO, make_table, with_datasets
from tests.attack.attacks_training import LIMIT, ODD, Tiny, back_to, flag, put
from tests.attack.harness import Case, Fault, attack

YAMLS = [
    "&a [*a]", "!!python/object/apply:os.system [exit]", "a: &a [x, x]\nb: &b [*a, *a]",
    "!!binary aGk=", "!!timestamp 2020-01-01", "!!set {a}", "!!int x", "!!float x", "<<: {a: 1}",
    "? [a, b]\n: c", "? {a: b}\n: c", "- a\n- b", "'", '"\\ud800"', "\t", "%YAML 9.9\n---\n",
    "--- a\n--- b", "a: b: c", "{" * 3000, "[" * 3000, "&x " * 99, "!!! x", "|\n \0", "\ufeff",
]  # fmt: skip


def odd_yaml(draw: Random, options: dict[str, object]) -> str | bytes:
    """Return a file of options that are no options, or no YAML."""
    kind = draw.randrange(6)
    lines = [f"{name}: {json.dumps(value, default=str)}" for name, value in options.items()]
    if kind == 0:
        name = draw.choice([*options, "x", "seed", "lora", "report_to", "freeze", "betas", "gpus"])
        value = draw.choice([*YAMLS, *(json.dumps(odd) for odd in ODD)])
        lines.insert(draw.randrange(len(lines) + 1), f"{name}: {value}")
    elif kind == 1:
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(YAMLS))
    elif kind == 2:
        place = draw.randrange(len(lines))
        lines[place] = f"{lines[place].partition(':')[0]}: {draw.choice(YAMLS)}"
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    if kind == 3:
        whole = bytearray(text)
        for _ in range(draw.randint(1, 5)):
            whole[draw.randrange(len(whole))] = draw.randrange(256)
        return bytes(whole)
    if kind == 4:
        return text[: draw.randrange(len(text))]
    if kind == 5:
        bomb = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))
        return draw.choice(["a0: &a0 x\n" + bomb, text.decode() + "\nlora: " + "[" * 50_000])
    return text


@attack("B", 13, weight=3, seconds=LIMIT)
def config_files_of_any_content(case: Case) -> None:
    """--config with values of other types, with bombs, tags and anchors, cut, or not text."""
    tiny, draw = Tiny(case), case.draw
    options: dict[str, object] = {
        "model": tiny.model,
        "train_files": [tiny.text],
        "output_dir": tiny.out,
        "separator": "",
        "seq_len": 32,
        "batch_size": 1,
        "max_steps": 1,
        "device": "cpu",
        "learning_rate": 1e-3,
        "quiet": True,
    }
    file = case.folder / "run.yaml"
    if case.turn(["content", "file"]) == "file":
        file.write_text("seed: 1")
        put(draw, file)
    else:
        found = odd_yaml(draw, options)
        file.write_bytes(found if isinstance(found, bytes) else found.encode("utf-8", "replace"))
    result = case.cli("finetune", "--config", file)
    result.fine_or_one_line()
    if len(result.err) > 3000:
        raise Fault(f"a message of {len(result.err)} characters")


@attack("C", 16, seconds=10)
def files_of_options_that_never_end(case: Case) -> None:
    """Pipes and endless devices as --config, --import, reward function, data and adapters."""
    tiny, draw = Tiny(case), case.draw
    kind = case.turn(["--config", "--import", "reward", "--files", "yaml", "teacher"])
    path = case.folder / ("x.py" if kind in ("--import", "reward") else "x.jsonl")
    if kind == "yaml":
        lines = draw.choice(["- a\n", "a: &x [1]\n", "x" * 99 + "\n", "{a: {", "? "])
        path.write_text(lines * draw.choice([10**4, 10**5, 10**6]))
    elif draw.random() < 0.5:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    if kind in ("--config", "yaml"):
        result = case.cli("finetune", "--config", path)
    elif kind == "--import":
        result = case.cli("families", "--import", path)
    elif kind == "--files":
        result = case.cli("evaluate", tiny.model, "--files", path, "--device", "cpu")
    elif kind == "teacher":
        teacher = case.folder / "teacher"
        shutil.copytree(tiny.model, teacher)
        name = draw.choice(["config.json", "model.safetensors", "tokenizer.json"])
        (teacher / name).unlink()
        path.rename(teacher / name)
        path = teacher / name
        result = tiny.start(teacher=teacher)
    else:
        tiny.text.rename(case.folder / "p.jsonl")
        tiny.text = case.folder / "p.jsonl"
        tiny.text.write_text('{"prompt": "a"}')
        result = tiny.start(**GRPO, reward_function=f"{path}:f")
    result.one_line(path.name)


def odd_lines(draw: Random) -> bytes:
    """Return lines of which some are no data."""
    lines: list[object] = [{"text": "the cat saw"}, {"prompt": "a", "completion": "b"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines.append({"messages": messages})
    odd = draw.choice([*ODD, {"text": draw.choice(ODD)}, {"messages": draw.choice(ODD)},
                       {"prompt": draw.choice(ODD), "completion": draw.choice(ODD)},
                       {"messages": [{"role": draw.choice(ODD), "content": draw.choice(ODD)}]},
                       {"conversations": draw.choice(ODD)}])  # fmt: skip
    lines.insert(draw.randrange(4), odd)
    text = "\n".join(map(json.dumps, lines)).encode("utf-8", "surrogatepass")
    if draw.random() < 0.3:
        whole = bytearray(text)
        whole[draw.randrange(len(whole))] = draw.randrange(256)
        return bytes(whole)
    return text if draw.random() < 0.8 else text[: draw.randrange(len(text))]


@attack("B", 13, weight=2, seconds=LIMIT)
def evaluate_takes_any_file(case: Case) -> None:
    """`evaluate` with odd lines, odd numbers, and models whose logits are not finite."""
    tiny, draw = Tiny(case), case.draw
    file = case.folder / "a.jsonl"
    file.write_text('{"text": "the cat saw a dog"}\n')
    kind = case.turn(["lines", "files", "numbers", "overflow", "adapter", "twice"])
    options: list[object] = ["--seq-len", 16]
    files: list[object] = [file]
    if kind == "lines":
        file.write_bytes(odd_lines(draw))
    elif kind == "files":
        put(draw, file)
    elif kind == "numbers":
        number = draw.choice([0, -1, 1, 2, 10**9, 10**30, "x", "", "nan", 1.5, "9" * 5000])
        options = [draw.choice(["--seq-len", "--batch-size", "--limit", "--num-fewshot"]), number]
    elif kind == "overflow":
        weights = tiny.model / "model.safetensors"
        tensors = load_file(weights)
        for name in tensors:
            if draw.random() < 0.7:
                tensors[name] = tensors[name] * 1e37
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "adapter":
        (tiny.model / "config.json").rename(tiny.model / "adapter_config.json")
    else:
        files += [file, tiny.text]
    if draw.random() < 0.5:
        options.append("--json")
    result = case.cli("evaluate", tiny.model, "--files", *files, *options, "--device", "cpu")
    result.fine_or_one_line()
    if result.code == 0:
        if "nan" in result.out.lower() or "inf" in result.out.lower():
            raise Fault(f"a loss that is no number: {result.out}")
        if "--json" in options:
            json.loads(result.out)


class Writer:
    """A stand-in for a logger's package, which fails sooner or later."""

    fails: Callable[[str], None] = staticmethod(lambda where: None)
    id = "an id"

    def __init__(self, *_: object, **__: object) -> None:
        self.fails("open")

    def log(self, *_: object, **__: object) -> None:
        self.fails("log")

    add_scalar = log

    def add_text(self, *_: object) -> None:
        """The settings are written when the logger is opened."""

    def close(self) -> None:
        self.fails("close")

    finish = close


@attack("B", 13, weight=2, seconds=LIMIT)
def loggers_that_fail(case: Case) -> None:
    """Loggers whose packages raise, and odd files where they write; the run itself is right."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    shutil.rmtree(tiny.out)
    kind = case.turn(["open", "log", "close", "file", "id"])
    error = draw.choice([RuntimeError("no\nway"), OSError(28, "full"), ValueError(), KeyError(3)])

    def fails(where: str) -> None:
        if where == kind and (where == "open" or draw.random() < 0.5):
            raise error

    failing = mock.patch.object(Writer, "fails", staticmethod(fails))
    made = types.SimpleNamespace(init=Writer, SummaryWriter=Writer)
    fakes: dict[str, Any] = {"tensorboardX": made, "torch.utils.tensorboard": made, "wandb": made}
    name = "wandb" if kind == "id" else draw.choice(["wandb", "tensorboard"])
    flags = ["--report-to", name]
    with mock.patch.dict(sys.modules, fakes), failing:
        if kind in ("file", "id"):
            if tiny.start(*flags).code != 0:
                raise Fault("the run does not work at all")
            back_to(tiny, 4)
            place = tiny.out / ("wandb_id" if name == "wandb" else "tensorboard")
            if kind == "id":
                place.write_bytes(draw.choice([b"", b"\xff", b"x" * 10**6, b"../..", b"\0"]))
            else:
                put(draw, place)
            result = tiny.resume()
        else:
            result = tiny.start(*flags)
    if kind in ("log", "close"):
        warned = [line for line in result.err.splitlines() if "report_to" not in line]
        if result.code != 0 or warned or tiny.weights() != weights:
            raise Fault(f"a logger ended or changed the run: {result.err[-400:]}")
    else:
        tiny.right_or_one_line(result, weights)


@attack("E", 18, seconds=LIMIT)
def a_quiet_run_is_quiet(case: Case) -> None:
    """--quiet with tables, samples, evaluations and several kinds of training."""
    tiny, draw = Tiny(case), case.draw
    kind = case.turn(["text", "table", "lora", "heads", "teacher", "samples", "streamed"])
    constants.HF_HOME = str(case.folder / "home")
    changes: dict[str, object] = {"max_steps": 2}
    flags: list[str] = []
    if kind == "table":
        with_datasets(case)
        tiny.text = case.folder / "a.csv"
        make_table(case, tiny.text, "the cat")
    elif kind == "lora":
        changes |= {"lora": "r=2", "load_in": draw.choice([None, "4bit", "8bit"])}
    elif kind == "heads":
        changes["medusa_heads"] = 2
    elif kind == "teacher":
        changes["teacher"] = tiny.model
    elif kind == "samples":
        flags = ["--sample-prompts", "the cat"]
    elif kind == "streamed":
        flags = ["--stream", "--eval-fraction", "0.2"]
    result = tiny.start(*flags, **changes)
    if result.code != 0 or result.err:
        raise Fault(f"exit code {result.code}, and on stderr: {result.err[-400:]}")
    again = tiny.start(flag("overwrite-output-dir"), *flags, **changes)
    if again.code != 0 or again.err:
        raise Fault(f"the second time, on stderr: {again.err[-400:]}")
