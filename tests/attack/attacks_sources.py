"""Attacks on what a run reads beside its model: data, teachers, references, rewards and configs."""

from __future__ import annotations

import json
import os
import shutil
import types
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import ligermodels
from tests.attack.attacks_beside import make_heads
from tests.attack.attacks_training import LIMIT, Tiny, back_to, put
from tests.attack.harness import Case, Fault, Skip, attack
from tests.training.tiny_run import make_checkpoint

PAIRS = [
    {"prompt": f"say {i}", "chosen": "a cat" * (1 + i % 3), "rejected": "a dog"} for i in range(12)
]


def change_weight(draw: Random, file: Path) -> None:
    """Change one weight of a file, as another fine-tuning would."""
    tensors = load_file(file)
    weight = tensors[draw.choice(sorted(tensors))].view(-1)
    weight[draw.randrange(len(weight))] += 0.5
    save_file(tensors, file, {"format": "pt"})


def flip(draw: Random, file: Path) -> None:
    """Flip a bit of a file."""
    whole = bytearray(file.read_bytes())
    whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    file.unlink()
    file.write_bytes(whole)


def start(tiny: Tiny, changes: dict[str, object], *flags: str) -> bytes:
    done = tiny.start(*flags, **changes)
    if done.code != 0:
        raise Fault(f"the run does not work at all: {done.err[-400:]}")
    return tiny.weights()


@attack("A", 6, weight=2, seconds=LIMIT)
def another_base_than_that_of_the_run_is_noticed(case: Case) -> None:
    """A checkpoint of a run is converted after a weight or the config of its base has changed."""
    tiny, draw = Tiny(case), case.draw
    kinds = ["lora", "4bit", "8bit", "freeze", "heads", "second stage"]
    kind = case.turn(kinds)
    changes: dict[str, object] = {"max_steps": 2, "save_steps": 1, "export_dtype": None}
    if kind == "freeze":
        changes["freeze"] = "embed_tokens"
    elif kind in ("heads", "second stage"):
        changes |= {"medusa_heads": 2, "medusa_stage": 2 if kind == "second stage" else 1}
        if kind == "second stage":
            make_heads(tiny.model)
    else:
        changes |= {"lora": "r=2"} | ({} if kind == "lora" else {"load_in": kind})
    start(tiny, changes)
    source, target = tiny.out / "checkpoint-1", case.folder / "new"
    if draw.random() < 0.3:
        result = case.cli("convert", source, target)
        if result.code != 0 or not ligermodels.AutoLiger.from_hf(target):
            raise Fault(f"the checkpoint cannot be converted: {result.err[-300:]}")
        return
    if kind == "second stage":  # All weights are in its checkpoints.
        back_to(tiny, 0)
        change_weight(draw, tiny.model / "medusa_lm_head.safetensors")
        tiny.resume().one_line("heads")
        return
    change_weight(draw, tiny.model / "model.safetensors")
    case.cli("convert", source, target).one_line(str(tiny.model))
    if target.exists():
        raise Fault("the conversion is refused, but something was written")


@attack("A", 6, weight=2, seconds=LIMIT)
def a_replaced_teacher_is_noticed(case: Case) -> None:
    """Between two lives of a run, its teacher changes, is damaged, or is gone."""
    tiny, draw = Tiny(case), case.draw
    teacher = make_checkpoint(case.folder / "teacher", hidden_size=32, intermediate_size=48)
    weights = start(tiny, {"teacher": teacher})
    back_to(tiny, draw.choice([0, 4]))
    kind = case.turn(["weights", "config", "bits", "file", "gone", "moved", "same", "nan"])
    file = teacher / "model.safetensors"
    if kind == "weights":
        change_weight(draw, file)
    elif kind == "config":
        config = json.loads((teacher / "config.json").read_text())
        config["rms_norm_eps"] = 1e-3
        (teacher / "config.json").write_text(json.dumps(config))
    elif kind == "bits":
        flip(draw, file)
    elif kind == "nan":
        tensors = load_file(file)
        tensors["model.norm.weight"][3] = float("nan")
        save_file(tensors, file)
    elif kind == "file":
        put(draw, teacher / draw.choice(sorted(os.listdir(teacher))))
    elif kind == "gone":
        shutil.rmtree(teacher)
    elif kind == "moved":
        teacher.rename(case.folder / "elsewhere")
    result = tiny.resume()
    tiny.right_or_one_line(result, weights)
    if (result.code == 0) != (kind == "same") and not (kind in ("file", "bits") and result.code):
        # A file that the teacher does not need may be gone, and the header has free bits.
        if kind not in ("file", "bits"):
            raise Fault(f"the teacher: {kind}, and the exit code is {result.code}: {result.err}")


@attack("A", 6, weight=2, seconds=LIMIT)
def a_damaged_reference_is_noticed(case: Case) -> None:
    """The stored log-probabilities of a reference are damaged, and the run is resumed."""
    tiny, draw = Tiny(case), case.draw
    tiny.text = case.folder / "pairs.jsonl"
    tiny.text.write_text("\n".join(map(json.dumps, PAIRS)))
    weights = start(tiny, {"loss": "dpo", "reference": "file", "eval_fraction": 0.2})
    back_to(tiny, 4)
    files = sorted((tiny.out / "reference").glob("*.safetensors"))
    file = draw.choice(files)
    kind = case.turn(["bits", "cut", "dtype", "values", "file", "gone", "swapped", "empty"])
    if kind == "bits":
        flip(draw, file)
    elif kind == "cut":
        os.truncate(file, draw.randrange(file.stat().st_size))
    elif kind in ("dtype", "values"):
        tensors = load_file(file)
        name = next(iter(tensors))
        tensors[name] = tensors[name].double() if kind == "dtype" else tensors[name] * 2
        save_file(tensors, file)
    elif kind == "file":
        put(draw, file)
    elif kind == "gone":
        shutil.rmtree(tiny.out / "reference")
    elif kind == "swapped":
        one, other = (each.read_bytes() for each in (files[0], files[-1]))
        files[0].write_bytes(other)
        files[-1].write_bytes(one)
    else:
        file.write_bytes(b"")
    result = tiny.resume()
    tiny.right_or_one_line(result, weights)
    if result.code != 0:
        if "remove the file" not in result.err:
            raise Fault(f"no way out: {result.err}")
        shutil.rmtree(tiny.out / "reference")
        again = tiny.resume()
        if again.code != 0 or tiny.weights() != weights:
            raise Fault(f"the way out leads nowhere: {again.err[-300:]}")


REWARD = "def score(completions, **columns):\n    return [float(len(x)) for x in completions]\n"
ODD_REWARDS = {
    "nan": "[float('nan')] * len(completions)",
    "inf": "[1e999] * len(completions)",
    "none": "[None] * len(completions)",
    "few": "[1.0]",
    "text": "['x'] * len(completions)",
    "nothing": "None",
    "number": "1.0",
    "exception": "1 / 0",
    "some": "[1.0, *[None] * (len(completions) - 1)]",
    "lists": "[[1.0]] * len(completions)",
    "exit": "exit(3)",
}
GRPO: dict[str, object] = {
    "loss": "grpo",
    "num_generations": 2,
    "batch_size": 2,
    "max_completion_length": 3,
    "max_steps": 2,
    "save_steps": 1,
    "eval_fraction": 0,
}


@attack("A", 6, weight=2, seconds=LIMIT)
def rewards_are_numbers_of_one_function(case: Case) -> None:
    """A reward function that changes between two lives, or returns what is no reward."""
    tiny, draw = Tiny(case), case.draw
    tiny.text = case.folder / "prompts.jsonl"
    tiny.text.write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(6)))
    file = case.folder / "rewards.py"
    file.write_text(REWARD)
    changes = GRPO | {"reward_function": f"{file}:score"}
    kind = case.turn(["changed", "gone", "file", *ODD_REWARDS])
    if kind in ODD_REWARDS:
        file.write_text(f"def score(completions, **columns):\n    return {ODD_REWARDS[kind]}\n")
        result = tiny.start(**changes)
        if kind == "some":
            if result.code != 0:
                raise Fault(f"a completion may have no reward: {result.err}")
        elif kind == "exit":
            if result.code == 0:
                raise Fault("the function ended the process, and the run seems to be right")
        else:
            result.one_line(str(file))
        return
    weights = start(tiny, changes)
    back_to(tiny, 1)
    if kind == "changed":
        at = file.stat().st_mtime_ns
        file.write_text(REWARD.replace("float(len(x))", "float(-len(x))"[:14]))
        os.utime(file, ns=(at, at))
    elif kind == "gone":
        file.unlink()
    else:
        put(draw, file)
    result = tiny.resume()
    result.one_line("rewards.py")
    if file.is_file():
        file.write_text(REWARD)
        tiny.right_or_one_line(tiny.resume(), weights)


def make_table(case: Case, file: Path, word: str) -> None:
    lines = "\n".join(f'"{word} saw a dog {i}"' for i in range(20))
    file.write_text(f"text\n{lines}\n")


@attack("A", 6, weight=3, seconds=LIMIT)
def data_that_changes_between_two_lives_is_noticed(case: Case) -> None:
    """Streamed files and mixed files, and their tokens in the cache, change or vanish."""
    constants.HF_HOME = str(case.folder / "home")
    tiny, draw = Tiny(case), case.draw
    other = case.folder / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": f"the dog saw {i} cats"}) for i in range(20)))
    files = [tiny.text, other]
    source = case.turn(["streamed", "mixed"])
    changes: dict[str, object] = {"train_files": None}
    flags = ["--train-files", *map(str, files)]
    flags += ["--data-weights", "1", "3"] if source == "mixed" else ["--stream"]
    weights = start(tiny, changes, *flags)
    back_to(tiny, draw.choice([0, 4]))
    kinds = ["changed", "longer", "gone", "file", "renamed", "cache gone", "cache bits"]
    kind = draw.choice([*kinds, "cache cut", "cache kind", "cache empty"])
    file = draw.choice(files)
    cache = case.folder / "home" / "ligermodels" / "tokens"
    folders = sorted(path for path in cache.iterdir() if path.is_dir())
    part = draw.choice(sorted(draw.choice(folders).iterdir()))
    noticed = kind in ("changed", "longer", "gone", "file", "renamed")
    if kind == "changed":
        file.write_text(file.read_text().replace("dog", "cow"))
    elif kind == "longer":
        with file.open("a") as opened:
            opened.write('\n{"text": "more"}' if file == other else "\n\nmore")
    elif kind == "gone":
        file.unlink()
    elif kind == "renamed":
        file.rename(file.with_name("b" + file.suffix))
    elif kind == "file":
        put(draw, file)
    elif kind == "cache gone":
        shutil.rmtree(cache)
    elif kind == "cache bits":
        flip(draw, part)
    elif kind == "cache cut":
        os.truncate(part, draw.randrange(part.stat().st_size))
    elif kind == "cache empty":
        part.write_bytes(b"")
    else:
        put(draw, draw.choice([part, part.parent, part.parent.with_suffix(".lock")]))
    result = tiny.resume()
    tiny.right_or_one_line(result, weights)
    if noticed and result.code == 0:
        raise Fault(f"the data: {kind}, and nobody noticed")
    if not noticed and result.code != 0 and ".lock" not in result.err:
        raise Fault(f"{kind}: {part.name}, which could be made again: {result.err}")


def with_datasets(case: Case) -> types.ModuleType:
    """Return the library with a cache in the case's folder."""
    try:
        import datasets
    except ImportError:
        raise Skip("datasets is not installed") from None
    constants.HF_HOME = str(case.folder / "home")
    datasets.config.HF_DATASETS_CACHE = case.folder / "home" / "datasets"
    return datasets


@attack("A", 6, weight=2, seconds=LIMIT)
def a_table_that_changes_is_noticed(case: Case) -> None:
    """A .csv file, or the copy of it in the cache, changes between two lives."""
    with_datasets(case)
    tiny, draw = Tiny(case), case.draw
    tiny.text = case.folder / "a.csv"
    make_table(case, tiny.text, "the cat")
    weights = start(tiny, {})
    back_to(tiny, draw.choice([0, 4]))
    kinds = ["changed", "gone", "file", "copy bits", "copy cut", "copy other", "copy file"]
    kind = case.turn([*kinds, "copy gone"])
    (copy,) = (case.folder / "home/ligermodels/data").glob("*.jsonl")
    if kind == "changed":
        make_table(case, tiny.text, draw.choice(["the cow", "the cats"]))
    elif kind == "gone":
        tiny.text.unlink()
    elif kind == "file":
        put(draw, tiny.text)
    elif kind == "copy bits":
        flip(draw, copy)
    elif kind == "copy cut":
        os.truncate(copy, draw.randrange(copy.stat().st_size))
    elif kind == "copy other":
        copy.write_text('{"text": "another"}\n')
    elif kind == "copy file":
        put(draw, copy)
    else:
        copy.unlink()
    result = tiny.resume()
    tiny.right_or_one_line(result, weights)
    if kind[:4] == "copy" and result.code != 0 and not copy.is_dir():
        raise Fault(f"{kind}, and it could be made again: {result.err}")
    if kind[:4] != "copy" and result.code == 0:
        raise Fault(f"the table: {kind}, and nobody noticed")


@attack("D", 17, seconds=LIMIT)
def data_sets_of_the_hub_that_lie(case: Case) -> None:
    """A data set that fails in odd ways, has odd rows, or is another one at the next start."""
    datasets = with_datasets(case)
    tiny, draw = Tiny(case), case.draw
    rows = [{"text": f"the cat saw {i} dogs", "n": i} for i in range(20)]
    tiny.text = Path("some/data")
    kind = case.turn(["error", "odd rows", "empty", "another", "gone"])
    errors: list[BaseException] = [
        *(ConnectionError("no\nway"), OSError(28, "full"), ValueError(), KeyError("x")),
        *(RuntimeError("\ud800"), AssertionError(), StopIteration(), RecursionError("deep")),
    ]
    odd: list[Any] = [
        [{"text": None}], [{"text": 7}], [{"x": 1}], [{"text": ["a"]}], [{"text": {"a": 1}}],
        [{"messages": [{"role": "x", "content": None}]}], [{"text": ""}], [{"text": b"\xff"}],
        [{"prompt": "a", "completion": None}], [{"text": "a" * 10**4}], [{"text": "\0"}],
    ]  # fmt: skip

    def load(*_: object, **__: object) -> Any:
        return datasets.Dataset.from_list(rows)

    def fails(*_: object, **__: object) -> Any:
        raise draw.choice(errors)

    if kind == "odd rows":
        rows = draw.choice(odd) * draw.choice([1, 3])
    elif kind == "empty":
        rows = []
    with mock.patch.object(datasets, "load_dataset", load):
        if kind == "error":
            with mock.patch.object(datasets, "load_dataset", fails):
                tiny.start().one_line("some/data")
            return
        result = tiny.start(max_steps=2)
        result.fine_or_one_line()
        if kind in ("odd rows", "empty"):
            return
        weights = tiny.weights()
        back_to(tiny, 0)
        if kind == "another":
            rows[draw.randrange(20)]["text"] = "another"
            tiny.resume().one_line()
            return
    with mock.patch.object(datasets, "load_dataset", fails):
        tiny.right_or_one_line(tiny.resume(), weights)
